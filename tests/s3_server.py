"""A real S3 server for tests and benchmarks: MinIO, built from source once per machine, run on loopback.

`python -m tests.s3_server` (`make s3-server`) builds it if necessary; see `tests.go_program`.

    with S3Server.started(directory) as server:
        server.make_bucket("b")
        lance.write_dataset(rows, "s3://b/t.lance", storage_options=server.storage_options)
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tests.go_program import GoProgram
from tests.support.server import ServerProcess

MINIO = GoProgram(
    title="the tests' S3 server (MinIO)",
    target="s3-server",
    module="github.com/minio/minio",
    package="github.com/minio/minio",
    version="v0.0.0-20260212201848-7aac2a2c5b7c",
    checksum="h1:/qdoYujxF5MBLDMVLeiYJ/7fBa1HikX39Dvzb9Ji8pA=",
    minutes=4,
)

_REGION = "us-east-1"
_READY_WITHIN = 120.0
_STARTS = 5
"""Number of attempts to start, since another process may take the port between its choice and the server's bind."""


# ---- running -------------------------------------------------------------------------------------------------------


@dataclass
class S3Server(ServerProcess):
    """A running server on loopback, with its own credentials and its objects in one directory.

    Thread safety. Any thread; but start it from a thread that lives as long as the server must: on Linux the
    server ends with that thread, so that a killed test run leaves no server behind.
    """

    endpoint: str
    access_key: str
    secret_key: str
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, directory: Path) -> S3Server:
        """Start a server and wait until it answers. Raises: RuntimeError with its last lines if it does not within 2
        minutes."""
        if not MINIO.path.exists():
            raise RuntimeError(f"{MINIO.path} is not built; run `make s3-server`")
        directory.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + _READY_WITHIN
        for _ in range(_STARTS):
            server = cls._launch(directory)
            if server.answers(deadline):
                return server
            server.stop()
        log = (directory / "log").read_text(errors="replace")
        raise RuntimeError(f"the S3 server did not answer at {server.endpoint}; its last words: {log[-800:]}")

    @property
    def storage_options(self) -> dict[str, str]:
        """The `storage_options` for pylance and memwal."""
        return self.options_at(self.endpoint)

    def options_at(self, endpoint: str) -> dict[str, str]:
        """Return the same through another endpoint: the fault proxy's."""
        return {
            "endpoint": endpoint,
            "access_key_id": self.access_key,
            "secret_access_key": self.secret_key,
            "region": _REGION,
            "allow_http": "true",
        }

    def client_at(self, endpoint: str, **config: Any) -> Any:
        """Return a plain botocore client, without code of memwal between the test and the server."""
        from botocore.config import Config

        return _session().create_client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=_REGION,
            config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}, **config),
        )

    @cached_property
    def client(self) -> Any:
        """A plain botocore client, directly to the server."""
        return self.client_at(self.endpoint)

    def make_bucket(self, name: str) -> None:
        """Create an empty bucket."""
        self.client.create_bucket(Bucket=name)

    def upload(self, directory: Path, uri: str) -> None:
        """Upload every file below `directory` as an object below `uri`, s3://bucket/prefix."""
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")

        def put(path: Path) -> None:
            key = f"{prefix}/{path.relative_to(directory).as_posix()}"
            self.client.put_object(Bucket=bucket, Key=key, Body=path.read_bytes())

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(put, [path for path in directory.rglob("*") if path.is_file()]))

    def download(self, uri: str, directory: Path) -> None:
        """Download every object below `uri` as a file below `directory`, which is created."""
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")

        def get(key: str) -> None:
            path = directory / key.removeprefix(f"{prefix}/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.client.get_object(Bucket=bucket, Key=key)["Body"].read())

        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/")
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(get, [each["Key"] for page in pages for each in page.get("Contents", ())]))

    @classmethod
    def _launch(cls, directory: Path) -> S3Server:
        address, console = (f"127.0.0.1:{port}" for port in free_ports(2))
        access_key, secret_key = "memwal-tests", os.urandom(12).hex()
        environ = {name: value for name, value in os.environ.items() if not name.startswith("MINIO_")}
        environ |= {
            "MINIO_ROOT_USER": access_key,
            "MINIO_ROOT_PASSWORD": secret_key,
            "MINIO_BROWSER": "off",
            "MINIO_UPDATE": "off",
            "MINIO_CI_CD": "1",  # accepts a directory of the system's disk
            "HOME": str(directory),
        }
        bound = [setpriv, "--pdeathsig", "TERM"] if (setpriv := shutil.which("setpriv")) else []
        arguments = [*bound, str(MINIO.path), "server", str(directory / "objects"), "--address", address]
        with (directory / "log").open("ab") as log:
            process = subprocess.Popen(
                [*arguments, "--console-address", console],
                env=environ,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return cls(f"http://{address}", access_key, secret_key, process)

    def answers(self, deadline: float) -> bool:
        """Return whether the server executes requests before `deadline`; False at once if it has ended.

        The request has credentials: the server reports itself ready before it knows its objects, and then still
        rejects requests with XMinioServerNotInitialized.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                self.client.list_buckets()
            except (BotoCoreError, ClientError):
                time.sleep(0.05)
            else:
                return True
        return False


@lru_cache
def _session() -> Any:
    from botocore.session import get_session  # a checkout that only builds the server need not have it

    return get_session()


def free_ports(count: int) -> list[int]:
    """Return free ports of loopback.

    They lie below the ports that the system assigns, so that no connection and no server that requests any port gets
    one of them before its user listens there.
    """
    found: list[int] = []
    while len(found) < count:
        port = 20_000 + int.from_bytes(os.urandom(2), "big") % 12_000
        with socket.socket() as looking, suppress(OSError):
            looking.bind(("127.0.0.1", port))
            found = list({*found, port})
    return found


if __name__ == "__main__":
    MINIO.build()
