"""The settings of one run: every value a person can choose, and the rules between them.

A field's metadata carries what the trigger form shows, so the form, the documentation
and the checks can't drift apart. Field names are unique across the sections: the form
is flat.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal, cast

from eagle3_tasks.contracts import codec
from eagle3_tasks.contracts.errors import InvalidSettings, RequestRefused

SETTINGS_VERSION = 1
_EMPTIED = "/tmp/"  # noqa: S108 - refused, not used
_SET_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


def setting(default: Any, title: str, description: str, **form: Any) -> Any:
    """Declare one setting. ``form`` may hold ``minimum``, ``maximum`` and ``examples``."""
    return dataclasses.field(default=default, metadata={"title": title, "description": description, **form})


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationSet:
    """Held-out conversations, and the accept length that the draft model must reach on them."""

    name: str
    path: str
    min_accept_length: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostSettings:
    """The GPU host and how much of it a run may use."""

    ssh_conn_id: str = setting(
        "eagle3_gpu_host", "SSH connection", "Airflow connection of type `ssh` that leads to the GPU host."
    )
    root: str = setting(
        "", "Root folder",
        "Absolute folder on the GPU host for everything that runs make; on a durable disk.",
        examples=["/data/eagle3"],
    )  # fmt: skip
    python: str = setting(
        "", "Python interpreter",
        "Absolute path on the GPU host. Empty: ROOT/env, which `eagle3_setup_host` makes, "
        "else a python3.11 or later on the PATH.",
    )  # fmt: skip
    device: Literal["cuda", "cpu"] = setting("cuda", "Device", "What target and draft model run on.")
    extraction_gpus: int = setting(
        8, "GPUs for extraction", "Cards that the target model needs.", minimum=0, maximum=1024
    )
    training_processes: int = setting(
        4, "Training processes", "One a card; on a CPU, processes.", minimum=1, maximum=1024
    )
    shard_slots: int = setting(
        1, "Shards at once", "Shards that one host extracts at the same time.", minimum=1, maximum=64
    )
    disk_reserve_gb: float = setting(
        50.0, "Disk reserve [GB]", "Free space on the root's file system that is never used.", minimum=0
    )
    orphan_minutes: float = setting(
        1440.0, "Orphan limit [min]",
        "A job that nobody has asked about for so long stops by itself after its current commit.", minimum=1,
    )  # fmt: skip
    poll_seconds: float = setting(
        5.0,
        "Poll interval [s]",
        "How often running jobs are asked for their state.",
        minimum=0.2,
        maximum=600,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The conversations and how they become samples."""

    conversations_path: str = setting(
        "", "Conversations",
        "Absolute path on the GPU host: JSONL with ShareGPT `conversations` or OpenAI `messages`.",
    )  # fmt: skip
    max_rows: int = setting(0, "Row limit", "Use only the first so many conversations; 0: all.", minimum=0)
    max_tokens: int = setting(
        4096, "Token limit", "Longer samples are cut after so many tokens.", minimum=16, maximum=1_048_576
    )
    max_reject_percent: float = setting(
        5.0, "Reject limit [%]", "More rejected conversations than this fail the run.", minimum=0, maximum=100
    )
    answers: Literal["dataset", "regenerate"] = setting(
        "dataset", "Answers",
        "`regenerate`: the target answers every question anew; worth about 10 % of accept length.",
    )  # fmt: skip
    answer_max_tokens: int = setting(
        2048, "Answer limit [tokens]", "Regenerated answers that reach it are dropped and counted.",
        minimum=1, maximum=1_048_576,
    )  # fmt: skip
    answer_temperature: float = setting(
        0.0,
        "Answer temperature",
        "Sampling temperature of regenerated answers; 0: greedy.",
        minimum=0,
        maximum=5,
    )
    rows_per_answer_shard: int = setting(
        2000, "Rows per answer shard", "Conversations that one regenerate task answers.", minimum=1
    )
    loss_mask: Literal["auto", "generation_tags"] = setting(
        "auto", "Loss mask",
        "`generation_tags` trusts only a chat template's `{% generation %}` marks. `auto` uses them where "
        "they are, and otherwise proves the spans by rendering each turn's prompt.",
    )  # fmt: skip
    template_date: str = setting(
        "2026-01-01", "Template date",
        "The day that chat templates see, YYYY-MM-DD: pinned, so that names stay.",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetSettings:
    """The target model."""

    target_model: str = setting(
        "", "Target model", "Folder on the GPU host (absolute path) or hub name.",
        examples=["/models/Kimi-K2.5", "Qwen/Qwen3-8B"],
    )  # fmt: skip
    target_revision: str = setting("", "Revision", "Commit or tag on the hub; empty for a folder.")
    capture_dtype: Literal["bfloat16", "float32"] = setting(
        "bfloat16", "Data type of captures", "Target and hidden states are kept in this type."
    )
    aux_layer_ids: tuple[int, ...] | None = setting(
        None, "Auxiliary layers",
        "Three 0-based decoder layers, ascending, whose OUTPUT is captured. Empty: 1, n//2 - 1, n - 4.",
    )  # fmt: skip
    trust_remote_code: bool = setting(
        False, "Trust remote code", "Run Python code that ships with the target model."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExtractionSettings:
    """How hidden states are captured and stored."""

    engine: Literal["huggingface"] = setting("huggingface", "Engine", "What runs the target model.")
    rows_per_shard: int = setting(
        2000, "Rows per shard", "Samples that one extract task captures.", minimum=1
    )
    capture_batch_tokens: int = setting(
        8192, "Tokens a batch", "Upper bound of padded tokens in one forward pass.", minimum=16
    )
    segment_mb: int = setting(1024, "Segment size [MB]", "A segment is closed at about this size.", minimum=1)
    max_quarantine_percent: float = setting(
        1.0,
        "Quarantine limit [%]",
        "More unusable samples in a shard than this fail it.",
        minimum=0,
        maximum=100,
    )
    verify_tier: Literal["quick", "sample", "full"] = setting(
        "sample", "Verification", "quick: receipts and sizes; sample: some checksums; full: all checksums."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftSettings:
    """The draft model's form. Zero means: as the target has it."""

    draft_vocab_size: int = setting(
        32000, "Draft vocabulary", "Target ids that the draft model can propose.", minimum=2
    )
    draft_intermediate_size: int = setting(0, "MLP width", "0: the target's.", minimum=0)
    draft_num_heads: int = setting(0, "Attention heads", "0: the target's.", minimum=0)
    draft_num_kv_heads: int = setting(0, "Key-value heads", "0: the target's.", minimum=0)
    draft_head_dim: int = setting(0, "Head size", "0: the target's.", minimum=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The training of the draft model."""

    epochs: int = setting(5, "Epochs", "Passes over the captured samples.", minimum=1, maximum=10_000)
    learning_rate: float = setting(
        1e-4, "Learning rate", "Peak of the schedule (cosine with warm-up).", minimum=0, maximum=1
    )
    warmup_percent: float = setting(1.5, "Warm-up [%]", "Share of steps.", minimum=0, maximum=100)
    clip_norm: float = setting(1.0, "Gradient clip", "Largest norm of a step's gradient.", minimum=0)
    weight_decay: float = setting(0.0, "Weight decay", "AdamW's.", minimum=0, maximum=1)
    ttt_steps: int = setting(
        7, "TTT steps", "Training-time test: steps unrolled in training.", minimum=1, maximum=16
    )
    batch_tokens: int = setting(
        8192, "Tokens a process", "Upper bound of padded tokens in one process's share of a step.", minimum=16
    )
    seed: int = setting(
        0, "Seed", "Of the order of samples and of fresh weights.", minimum=0, maximum=2**31 - 1
    )
    checkpoint_minutes: float = setting(
        10.0, "Checkpoint interval [min]", "At most so much training is lost by a crash.", minimum=0.001
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """How the draft model is judged before it is published."""

    draft_steps: int = setting(
        3, "Draft steps", "Tokens that the draft model guesses each round.", minimum=1, maximum=16
    )
    evaluation_rows: int = setting(
        40, "Rows a set", "Conversations of each set that are answered.", minimum=1
    )
    evaluation_max_tokens: int = setting(128, "Answer limit [tokens]", "Of evaluation answers.", minimum=2)
    min_accept_length: float = setting(
        1.5, "Accept length demanded", "On the run's own training questions; below it nothing is published.",
        minimum=0, maximum=17,
    )  # fmt: skip
    evaluation_sets: tuple[EvaluationSet, ...] = setting(
        (), "Held-out sets",
        "A list of objects: `name`, `path` (JSONL as the conversations), and `min_accept_length` for a gate.",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a run. Building one checks the rules between fields.

    Raises:
        InvalidSettings: two values, or one by itself, can't work.
    """

    version: int = SETTINGS_VERSION
    host: HostSettings = dataclasses.field(default_factory=HostSettings)
    data: DataSettings = dataclasses.field(default_factory=DataSettings)
    target: TargetSettings = dataclasses.field(default_factory=TargetSettings)
    extraction: ExtractionSettings = dataclasses.field(default_factory=ExtractionSettings)
    draft: DraftSettings = dataclasses.field(default_factory=DraftSettings)
    training: TrainingSettings = dataclasses.field(default_factory=TrainingSettings)
    evaluation: EvaluationSettings = dataclasses.field(default_factory=EvaluationSettings)

    def __post_init__(self) -> None:
        problems = [*_bound_problems(self), *_rule_problems(self)]
        if problems:
            raise InvalidSettings(" ".join(problems))


SECTIONS: Mapping[str, type] = {
    "host": HostSettings,
    "data": DataSettings,
    "target": TargetSettings,
    "extraction": ExtractionSettings,
    "draft": DraftSettings,
    "training": TrainingSettings,
    "evaluation": EvaluationSettings,
}


def settings_from_flat(values: Mapping[str, object]) -> Settings:
    """Build settings from flat ``name: value`` pairs, as the form and the presets give them.

    Raises:
        InvalidSettings: an unknown name, a wrong type, or values that can't work.
    """
    sections: dict[str, dict[str, object]] = {}
    owners = {field.name: section for section, kind in SECTIONS.items() for field in dataclasses.fields(kind)}
    for name, value in values.items():
        if name not in owners:
            raise InvalidSettings(f"there is no setting {name!r}. Known: {', '.join(sorted(owners))}.")
        sections.setdefault(owners[name], {})[name] = value
    try:
        return codec.from_plain(Settings, sections, where="settings")
    except RequestRefused as error:
        raise InvalidSettings(str(error)) from error


def host_settings(values: Mapping[str, object]) -> Settings:
    """Build settings for work on a host alone, which asks nothing about data or models.

    Raises:
        InvalidSettings: as :func:`settings_from_flat`.
    """
    # Settings are whole or refused; these two are read by no such work.
    return settings_from_flat({"conversations_path": "/dev/null", "target_model": "none", **values})


def _bound_problems(settings: Settings) -> list[str]:
    problems: list[str] = []
    for section, kind in SECTIONS.items():
        for field in dataclasses.fields(kind):
            value: object = getattr(getattr(settings, section), field.name)
            if isinstance(value, str) and ("\0" in value or "\n" in value or "\r" in value):
                problems.append(f"{field.name} holds a line break or a zero byte.")
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            minimum, maximum = field.metadata.get("minimum"), field.metadata.get("maximum")
            if minimum is not None and value < minimum:
                problems.append(f"{field.name} is {value}; at least {minimum} is possible.")
            if maximum is not None and value > maximum:
                problems.append(f"{field.name} is {value}; at most {maximum} is possible.")
    return problems


def _rule_problems(settings: Settings) -> list[str]:
    host, data, target, draft = settings.host, settings.data, settings.target, settings.draft
    problems = [
        *_path_problems("root", host.root, needed=True),
        *_path_problems("python", host.python, needed=False),
        *_path_problems("conversations_path", data.conversations_path, needed=True),
    ]
    if host.root == "/" or f"{host.root}/".startswith(_EMPTIED):
        problems.append(
            f"root is {host.root!r}, which a reboot may empty. Choose a folder on a durable disk."
        )
    if not host.ssh_conn_id:
        problems.append("ssh_conn_id is empty. Name an Airflow connection of type ssh.")
    if not target.target_model:
        problems.append("target_model is empty. Give a folder on the GPU host or a hub name.")
    if host.device == "cuda" and host.extraction_gpus < 1:
        problems.append("extraction_gpus is 0, but device is 'cuda'. Choose the CPU or at least one card.")
    if data.answers == "regenerate" and data.answer_max_tokens >= data.max_tokens:
        problems.append(
            f"answer_max_tokens is {data.answer_max_tokens}, which leaves no room for a question within "
            f"max_tokens {data.max_tokens}. Lower the first or raise the second."
        )
    if re.fullmatch(r"\d{4}-\d{2}-\d{2}", data.template_date) is None:
        problems.append(f"template_date is {data.template_date!r}, not of the form 2026-01-31.")
    layers = target.aux_layer_ids
    if layers is not None and (len(layers) != 3 or min(layers) < 0 or sorted(set(layers)) != list(layers)):
        problems.append(
            f"aux_layer_ids is {list(layers)}; three different layers in ascending order are needed."
        )
    heads, kv_heads = draft.draft_num_heads, draft.draft_num_kv_heads
    if heads and kv_heads and heads % kv_heads:
        problems.append(f"draft_num_heads {heads} is not a multiple of draft_num_kv_heads {kv_heads}.")
    if draft.draft_head_dim % 2:
        problems.append(f"draft_head_dim is {draft.draft_head_dim}; rotary positions need an even size.")
    if settings.training.learning_rate <= 0:
        problems.append("learning_rate must be above 0.")
    names = [one.name for one in settings.evaluation.evaluation_sets]
    for one in settings.evaluation.evaluation_sets:
        if _SET_NAME.fullmatch(one.name) is None or one.name == "training" or names.count(one.name) > 1:
            problems.append(
                f"evaluation set name {one.name!r}: lower-case letters, digits and _ are possible, "
                "each name once, and 'training' is taken."
            )
        problems += _path_problems(f"path of evaluation set {one.name!r}", one.path, needed=True)
    return problems


def _path_problems(name: str, path: str, *, needed: bool) -> list[str]:
    if not path:
        return [f"{name} is empty. Give an absolute path on the GPU host."] if needed else []
    parts = path.split("/")
    if not path.startswith("/") or ".." in parts:
        return [f"{name} is {path!r}; an absolute path without '..' is needed."]
    return []


def flat_values(settings: Settings) -> dict[str, object]:
    """Give the settings back as flat pairs of plain JSON values."""
    plain = cast("dict[str, dict[str, object]]", codec.to_plain(settings))
    return {name: value for section in SECTIONS for name, value in plain[section].items()}
