"""`python -m glmv`, which is also how torchrun starts it."""

from glmv.cli import main

main()
