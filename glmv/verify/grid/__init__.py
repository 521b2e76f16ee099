"""The parity grid: one training step under every combination of parallel features, each judged by the law."""
