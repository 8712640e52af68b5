"""The commands: `ringstrategy-train`, `ringstrategy-report` and `ringstrategy-plan`."""
