"""Run `python -m ppo_core JOB` on a GPU with a limit of memory; print the peaks of the allocator.

Arguments: settings file of the job, and the bytes that PyTorch's allocator may reserve.
"""

import json
import sys

import torch

from ppo_core.__main__ import main

if __name__ == "__main__":
    job, limit = sys.argv[1], int(sys.argv[2])
    torch.cuda.set_per_process_memory_fraction(
        min(1.0, limit / torch.cuda.get_device_properties(0).total_memory)
    )
    code = main([job])
    peaks = {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }
    print(json.dumps(peaks))
    sys.exit(code)
