"""Accept length, simulated and looped."""
