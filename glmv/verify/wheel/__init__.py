"""The real torch_npu wheel on a machine without an NPU: its schemas, meta kernels and autograd nodes.

The wheel is put into a side directory and imported on stand-in vendor libraries, always in a process of its own.
"""
