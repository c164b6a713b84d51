"""How often Airflow tries again: a node's problem mends itself within hours, or not at all."""

from __future__ import annotations

import os
from datetime import timedelta

# The environment lowers them where a test can't wait; ``default_args`` wins over both.
RETRIES = int(os.environ.get("EAGLE3_RETRIES", "10"))
RETRY_DELAY = timedelta(seconds=float(os.environ.get("EAGLE3_RETRY_SECONDS", "60")))
MAX_RETRY_DELAY = timedelta(minutes=30)
MAX_OUTAGE_HOURS = 48.0
