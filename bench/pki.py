"""A throwaway certificate authority, by the openssl command: for benchmarks and tests of TLS. Files are written where
the caller says."""

from __future__ import annotations

import subprocess
from pathlib import Path


class Authority:
    """Certificates signed by one authority of its own. `ca` is its certificate; keys have mode 600."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self.directory, self.name = directory, name
        self.ca = directory / f"{name}.pem"
        _openssl(
            "req", "-x509", *_key(directory / f"{name}.key"), "-out", self.ca, "-subj", f"/CN={name}", "-days", "2"
        )

    def issue(self, name: str, *, hosts: str = "DNS:localhost,IP:127.0.0.1,IP:::1", days: int = 2) -> tuple[Path, Path]:
        """(certificate, key) for these hosts. Fewer than 0 days: it has expired."""
        request, cert, key = (self.directory / f"{name}.{kind}" for kind in ("csr", "pem", "key"))
        _openssl("req", *_key(key), "-out", request, "-subj", f"/CN={name}", "-addext", f"subjectAltName={hosts}")
        signer = ("-CA", self.ca, "-CAkey", self.directory / f"{self.name}.key", "-CAcreateserial")
        _openssl("x509", "-req", "-in", request, *signer, "-out", cert, "-copy_extensions", "copy", "-days", str(days))
        key.chmod(0o600)
        return cert, key


def _key(path: Path) -> tuple[str | Path, ...]:
    return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", path)


def _openssl(*arguments: str | Path) -> None:
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise RuntimeError(f"openssl {arguments[0]} failed: {done.stderr.strip()[-400:]}")
