"""How long to wait before a request is sent again: pauses that grow, and what a server's `Retry-After` says."""

import email.utils
import random
import re
from datetime import UTC, datetime


def drawn_pause_s(retry: int, first_s: float, longest_s: float) -> float:
    """Seconds before the retry of that number, from 0: drawn from 0 to a bound, which starts at `first_s` and doubles up to `longest_s`.

    They are drawn so that clients that failed together do not retry together ("Exponential Backoff and Jitter", AWS Architecture
    Blog, 2015: full jitter).
    """
    return random.uniform(0.0, min(longest_s, first_s * 2.0**retry))


def retry_after_s(header: str | None) -> float | None:
    """The seconds that the header `Retry-After` asks for, as a number or as a date (RFC 9110, section 10.2.3); None if it says none."""
    said = (header or "").strip()
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]+)?", said):  # the fraction is not in the RFC, and some endpoints send one
        return float(said)
    try:
        date = email.utils.parsedate_to_datetime(said)
    except (ValueError, OverflowError):  # of a number that no date has
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    return max(0.0, (date - datetime.now(UTC)).total_seconds())
