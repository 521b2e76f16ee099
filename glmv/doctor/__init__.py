"""`glmv doctor`: what this machine has, what will run on what, and why not on more."""
