"""The page on which people label pairs of answers, served while a context lasts."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from human_feedback.label_server import label_server
from human_feedback.labeling import Labeling
from human_feedback.read_opinions import read_pairs
from pipeline.inputs.human_labels_to_pairs import votes_of


@contextmanager
def served(pairs: str, file: Path, annotator: str = "ann") -> Iterator[str]:
    """Serve the pairs of a file, and write labels to `file`; yield the address of the page."""
    server, address = label_server(Labeling(votes_of(read_pairs(pairs)), annotator, file), 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield address
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
