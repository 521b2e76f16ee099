"""The training step, the loop around it, and what a run says about itself."""
