"""Compare the files of a folder with their record in a download or a manifest."""

from collections.abc import Mapping
from pathlib import Path

from pipelines.host.files import FileRecord, sha256_file


def differing(folder: Path, files: Mapping[str, FileRecord]) -> list[str]:
    """Return the names whose file is missing or has another size or SHA-256."""

    def same(path: Path, record: FileRecord) -> bool:
        return path.is_file() and path.stat().st_size == record["size"] and sha256_file(path) == record["sha256"]

    return [name for name, record in files.items() if not same(folder / name, record)]
