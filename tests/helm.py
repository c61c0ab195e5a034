"""Build and run Helm, which checks and renders the chart of configs/deploy/helm.

`python -m tests.helm` (`make helm`) builds it once per machine; see `tests.go_program`.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from tests.go_program import GoProgram

HELM = GoProgram(
    title="Helm",
    target="helm",
    module="helm.sh/helm/v3",
    package="helm.sh/helm/v3/cmd/helm",
    version="v3.22.0",
    checksum="h1:n1if5iQgHYsujPAcO5oonH/KiSNUmqmUF0iGVjSF3AU=",
    minutes=2,
)


def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Helm without the user's cluster, plugins and repositories. Raises: RuntimeError if it is not built."""
    if not HELM.path.exists():
        raise RuntimeError(f"{HELM.path} is not built; run `make helm`")
    with tempfile.TemporaryDirectory() as home:
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("HELM_", "KUBE"))}
        environ |= {"HOME": home, "KUBECONFIG": os.devnull}
        environ |= {f"XDG_{kind}_HOME": home for kind in ("CACHE", "CONFIG", "DATA")}
        return subprocess.run([HELM.path, *arguments], env=environ, capture_output=True, text=True, timeout=300)


if __name__ == "__main__":
    HELM.build()
