"""Reading the log of steps while a rank may be writing it."""

import json


def steps_of(path):
    """The entries of all whole lines; of a line that is being written a reader may see a part."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
