"""glmv: GLM-4.5V training on FSDP2, and the framework that proves it right."""

import os

__version__ = "0.1.0"

if "GLMV_FAULT" in os.environ:
    from glmv.verify.faults.hook import install_or_refuse

    install_or_refuse()

from glmv.npu_package import guard

guard()
