"""Checkpoints: Hugging Face directories, training checkpoints (DCP), and the way between them."""
