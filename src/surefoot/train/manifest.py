"""The manifest: the last file of a checkpoint to be written, and what makes it whole.

It holds size and sha256 of every other file, and its own sha256. A folder without it is a save that was cut short.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
RECORD = "record.json"
METADATA = ".metadata"
FORMAT = 1


class CheckpointError(Exception):
    """A checkpoint could not be written or must not be read; the text gives file, rule and way out."""


@dataclass(frozen=True)
class FileSeal:
    """What a file of a checkpoint must be."""

    sha256: str
    """64 hex digits."""
    num_bytes: int


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's files by name, and how many ranks wrote them."""

    world_size: int
    files: Mapping[str, FileSeal]

    @property
    def num_bytes(self) -> int:
        return sum(seal.num_bytes for seal in self.files.values())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Make the checkpoint whole, in one rename; everything it lists must be on disk by then."""
    body = {
        "format": FORMAT,
        "world_size": manifest.world_size,
        "files": {name: [seal.num_bytes, seal.sha256] for name, seal in sorted(manifest.files.items())},
    }
    text = json.dumps({**body, "sha256": _own_hash(body)}, indent=1) + "\n"
    write_durably(folder / MANIFEST, text.encode())
    sync_folder(folder.parent)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, itself checked; CheckpointError when there is none or it is damaged."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_bytes())
        claimed = content.pop("sha256")
        version, world_size, files = content["format"], content["world_size"], content["files"]
        own = _own_hash(content)
        seals = {name: FileSeal(sha256=str(sha256), num_bytes=int(size)) for name, (size, sha256) in files.items()}
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing, so this save was cut short; use an older checkpoint") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: unreadable ({error}); use an older checkpoint") from error
    if claimed != own:
        raise CheckpointError(f"{path}: sha256 is {own}, but it says {claimed}; it was changed after it was written")
    if version != FORMAT:
        raise CheckpointError(f"{path}: format {version}, but this version of surefoot reads format {FORMAT}")
    if outside := [name for name in seals if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name]:
        raise CheckpointError(f"{path}: lists {outside[0]!r}, but a checkpoint's files lie in its own folder")
    if missing := {RECORD, METADATA} - seals.keys():
        raise CheckpointError(f"{path}: does not list {min(missing)}, which every checkpoint has")
    return Manifest(world_size=int(world_size), files=seals)


def whole(folder: Path) -> bool:
    """Whether the manifest is there and every file has its size; contents are not read (see ``verify``)."""
    try:
        manifest = read_manifest(folder)
        return all((folder / name).stat().st_size == seal.num_bytes for name, seal in manifest.files.items())
    except (CheckpointError, OSError):
        return False


def verify(folder: Path) -> list[str]:
    """Everything wrong with a checkpoint, a sentence each with file and both hashes; reads every byte. Empty is good."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return [str(error)]
    return check_files(folder, manifest, sorted(manifest.files))


def check_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """What is wrong with these files of a checkpoint."""
    problems = []
    for name in names:
        path, seal = folder / name, manifest.files[name]
        writer = re.fullmatch(r"__(\d+)_\d+\.distcp", name) if manifest.world_size > 1 else None
        by = f" (written by rank {writer[1]})" if writer else ""
        try:
            if path.is_symlink() or not path.is_file():
                problems.append(f"{path}{by}: missing, but the manifest lists it with {seal.num_bytes} bytes")
                continue
            size = path.stat().st_size
            if size != seal.num_bytes:
                problems.append(
                    f"{path}{by}: {size} bytes, but the manifest says {seal.num_bytes}; it ends at offset {size}"
                )
                continue
            with path.open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            problems.append(f"{path}{by}: unreadable ({error.strerror or error})")
            continue
        if found != seal.sha256:
            problems.append(f"{path}{by}: sha256 is {found}, but the manifest says {seal.sha256}; its content changed")
    return problems


def newest_valid(
    folders: Sequence[Path], check: Callable[[Path], list[str]] = verify
) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The first of ``folders`` (newest first) that verifies, and those refused before it, each with the reason to say aloud."""
    refused: list[tuple[Path, str]] = []
    for folder in folders:
        problems = check(folder)
        if not problems:
            return folder, refused
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        refused.append((folder, problems[0] + more))
    return None, refused


def remove_checkpoint(folder: Path) -> None:
    """Delete a checkpoint, manifest first, so that a crash half-way leaves something that is plainly not one."""
    (folder / MANIFEST).unlink(missing_ok=True)
    if folder.is_dir():
        sync_folder(folder)
        shutil.rmtree(folder)


def write_durably(path: Path, content: bytes) -> None:
    """Write a file that is either there in full or not at all, also after a power cut."""
    draft = path.with_name(path.name + ".tmp")
    with draft.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Put a folder's list of names on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _own_hash(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
