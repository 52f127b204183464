"""Fetch or publish in a process of its own, which a test kills: WORD ADDRESS FOLDER."""

import sys
from pathlib import Path

from pipeline.storage.addresses import S3Address
from pipeline.storage.download import fetch
from pipeline.storage.local_cache import LocalCache
from pipeline.storage.upload import publish

if __name__ == "__main__":
    word, address, folder = sys.argv[1:]
    if word == "fetch":
        fetch(S3Address.parse(address), LocalCache(Path(folder)))
    else:
        publish(Path(folder), S3Address.parse(address))
