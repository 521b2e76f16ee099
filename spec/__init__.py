"""The law: GLM-4.5V, its loss and one training step, written from the formulas in plain PyTorch.

Nothing here is fast, sharded or configurable beyond the model's own config. Weights are read by the names under which
they are published (`model.language_model.layers.1.mlp.experts.0.gate_proj.weight`), arithmetic follows a `Policy`, and
float64 is the truth that the machine in `glmv/` is held against.
"""
