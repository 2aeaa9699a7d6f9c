"""The status page: one file, allowed to do no more than its own script and style say."""

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from starlette.responses import Response


@cache
def _page() -> tuple[bytes, str]:
    """The file, and a content security policy that names its script and style by their hashes."""
    html = files(__package__).joinpath("page.html").read_text("utf-8")

    def hashes(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digests = (hashlib.sha256(each.encode()).digest() for each in found)
        return " ".join(f"'sha256-{base64.b64encode(each).decode()}'" for each in digests)

    policy = (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return html.encode(), policy


def status_page() -> Response:
    """The page as an answer."""
    html, policy = _page()
    headers = {
        "content-security-policy": policy,
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return Response(html, media_type="text/html; charset=utf-8", headers=headers)
