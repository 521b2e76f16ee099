"""A complete GLM-4.5V directory in Hugging Face format, small enough to train on one CPU core."""
