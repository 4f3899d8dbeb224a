"""One question to a server, answered or not: no retries, no redirects; no proxy, as there is none for `runtime.http`."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request

_LONGEST_GET = 16 << 20  # bytes


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """urllib would send the key along to wherever a server says."""

    def redirect_request(self, *args: object, **kwargs: object) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler({}))


def get(url: str, key: str | None, seconds: float) -> bytes:
    """The answer of a server to one request, of 16 MiB at most; redirects are not followed.

    Args:
        key: sent as a bearer token.
        seconds: how long it may say nothing.

    Raises:
        OSError: no answer, or none that is HTTP; `urllib.error.HTTPError` for a status that is none of 200 to 299.
        ValueError: the answer is too long.
    """
    request = urllib.request.Request(url, headers={"User-Agent": "megatron-rl"})
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with _OPENER.open(request, timeout=seconds) as reply:
            content: bytes = reply.read(_LONGEST_GET + 1)
    except http.client.HTTPException as error:
        raise OSError(f"no HTTP: {error!r:.200}") from None
    if len(content) > _LONGEST_GET:
        raise ValueError(f"the answer has more than {_LONGEST_GET:,} bytes")
    return content
