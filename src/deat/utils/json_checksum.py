"""Checksums of JSON documents, by which damage and later edits are seen."""

import json
from hashlib import sha256
from typing import Any

CHECKSUM_KEY = "checksum"


def compute_checksum(content: dict[str, Any]) -> str:
    """Return a hash of a JSON document without its checksum; it does not depend on the order of keys."""
    values = json.loads(json.dumps({name: value for name, value in content.items() if name != CHECKSUM_KEY}))
    return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def add_checksum(content: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON document with its checksum as the last entry."""
    values = {name: value for name, value in content.items() if name != CHECKSUM_KEY}
    return {**values, CHECKSUM_KEY: compute_checksum(values)}


def is_unchanged(content: dict[str, Any]) -> bool:
    """Whether a document is as it was written; True for one without a checksum, of an older version of deat."""
    return CHECKSUM_KEY not in content or content[CHECKSUM_KEY] == compute_checksum(content)
