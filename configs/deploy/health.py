#!/usr/bin/env python3
"""Exit with 0 if memwal in this container is ready: the health check of the images, which have no curl.

MEMWAL_HEALTH_URL: the page to request; memwal is ready if it answers 200. The certificate is not verified: the address
is the container's own, and the certificate has the name that other hosts use.
"""

import os
import ssl
import sys
import urllib.error
import urllib.request

URL = os.environ.get("MEMWAL_HEALTH_URL", "https://127.0.0.1:9464/health/readyz")
TIMEOUT = 8.0
"""Seconds. memwal answers within 5, even while storage does not answer."""


def main() -> int:
    """Send one request; print the reason if memwal is not ready."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    # No proxy: the environment of a container may name one.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(URL, timeout=TIMEOUT):
            return 0
    except urllib.error.HTTPError as error:
        print(f"{URL}: {error.code} {error.read(1000).decode(errors='replace').strip()}")
    except OSError as error:
        print(f"{URL}: {error}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
