"""An OCI image layout made of directories, for skopeo to copy from."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tarfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Layer:
    """A plain tar of the layout; for a plain one both digests are the same."""

    digest: str
    size: int


class Layout:
    """An OCI image layout, in the least that skopeo reads."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._blobs = root / "blobs/sha256"
        self._blobs.mkdir(parents=True)
        self._manifests: list[dict[str, object]] = []
        (root / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def layer(self, tree: Path) -> Layer:
        """A directory as a layer; what overlayfs says is deleted becomes OCI's whiteouts."""
        fresh = self._blobs / "fresh"
        with tarfile.open(fresh, "w", format=tarfile.PAX_FORMAT) as tar:
            for where, directories, files in os.walk(tree):
                directories.sort()
                for name in sorted(directories + files):
                    path = Path(where, name)
                    status = path.lstat()
                    if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
                        tar.addfile(tarfile.TarInfo(str(path.relative_to(tree).with_name(f".wh.{name}"))))
                    elif not stat.S_ISSOCK(status.st_mode):
                        tar.add(path, str(path.relative_to(tree)), recursive=False)
                        if stat.S_ISDIR(status.st_mode) and _opaque(path):
                            tar.addfile(tarfile.TarInfo(str(path.relative_to(tree) / ".wh..wh..opq")))
        with fresh.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = fresh.stat().st_size
        fresh.rename(self._blobs / digest)
        return Layer(digest, size)

    def image(self, name: str, layers: list[Layer]) -> None:
        kind = "application/vnd.oci.image"
        config = {
            "architecture": "amd64", "os": "linux", "config": {"Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer.digest}" for layer in layers]},
        }  # fmt: skip
        manifest = {
            "schemaVersion": 2, "mediaType": f"{kind}.manifest.v1+json",
            "config": self._json(config, f"{kind}.config.v1+json"),
            "layers": [_descriptor(layer.digest, layer.size, f"{kind}.layer.v1.tar") for layer in layers],
        }  # fmt: skip
        described = self._json(manifest, f"{kind}.manifest.v1+json")
        self._manifests.append({**described, "annotations": {"org.opencontainers.image.ref.name": name}})
        (self.root / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": self._manifests}))

    def _json(self, what: object, kind: str) -> dict[str, object]:
        data = json.dumps(what).encode()
        digest = hashlib.sha256(data).hexdigest()
        (self._blobs / digest).write_bytes(data)
        return _descriptor(digest, len(data), kind)


def _descriptor(digest: str, size: int, kind: str) -> dict[str, object]:
    return {"mediaType": kind, "digest": f"sha256:{digest}", "size": size}


def _opaque(path: Path) -> bool:
    try:
        return os.getxattr(path, "trusted.overlay.opaque") == b"y"
    except OSError:
        return False
