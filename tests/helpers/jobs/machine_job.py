"""One machine of a PPO training that shares nothing but S3 with the others.

    python -m tests.helpers.jobs.machine_job SETTINGS INDEX COUNT ATTEMPT PREFIX

SETTINGS are those of the job, as JSON. An empty PREFIX copies nothing to S3.
"""

import json
import sys
from pathlib import Path

from pipeline.launch.checkpoint_mirror import mirrored
from pipeline.launch.commands import Machines
from pipeline.launch.launcher import train
from pipeline.storage.workspace import Workspace
from tests.helpers.servers.servers import BUCKET

if __name__ == "__main__":
    settings, index, count, attempt, prefix = sys.argv[1:]
    folder = Path(json.loads(settings)["output_dir"])
    here = Machines(count=int(count), index=int(index), main_address="localhost", attempt=attempt)
    workspace = Workspace(str(folder.parent), prefix and f"s3://{BUCKET}/{prefix}")
    with mirrored(workspace, folder, here):
        folder.mkdir(parents=True, exist_ok=True)
        job = folder / f"settings-{index}.json"
        job.write_text(settings)
        train(job, processes=1, machines=here)
