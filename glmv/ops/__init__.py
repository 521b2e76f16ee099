"""What the model calls that has more than one implementation: experts, attention; and the small pieces between them."""

import glmv.ops.npu  # noqa: F401 - registers what an NPU has of its own
