"""`python -m glmv.verify.faults`: what `glmv faults` starts, in a process that has not imported what faults go into."""

from glmv.verify.faults.cli import main

main()
