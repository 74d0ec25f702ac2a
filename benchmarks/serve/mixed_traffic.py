"""Requests of many kinds, each with its right answer."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from running import Place, endpoint, post, text_body

from serve.model.pipeline import Pipeline
from serve.settings import Limits

MOST_CHARACTERS = 2000
MOST_TEXTS = 16  # a request
SCRIPTS = (
    "东京塔在哪里请播放周杰伦的歌曲明天天气怎么样",  # Chinese
    "明日の東京の天気を教えてください音楽をかけて",  # Japanese
    "내일 서울 날씨를 알려 주세요 음악을 틀어",  # Korean
    "شغل بعض الموسيقى من السبعينيات",  # Arabic, right to left
    "Сыграй что-нибудь из семидесятых",  # Cyrillic
    "เปิดเพลงจากยุคเจ็ดสิบ",  # Thai, no blanks
    "e\u0301a\u0308o\u0302n\u0303",  # combining marks
    "\t\n\u00a0\u200b\u200d\ufeff",  # white space, some of no width
    "!?.,;:-–—\"'()[]{}<>@#$%^&*+=/\\|~`",
)
EMOJI = ("🙏", "🎵", "👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇦🇹", "1️⃣", "🫠")


@dataclass(frozen=True)
class Asked:
    """A whole request, the status it needs, and for 200 the `results`."""

    request: bytes
    status: int
    results: Any = None


def texts_of_all_lengths(words: Sequence[str], count: int, seed: int = 0) -> list[str]:
    """Texts of 1 to MOST_CHARACTERS characters, uniform in the logarithm, of words, other scripts and emoji."""
    chance = random.Random(seed)
    found = []
    for length in np.exp(np.random.default_rng(seed).uniform(0, np.log(MOST_CHARACTERS), count)):
        strange = chance.choice((0.0, 0.0, 0.1, 0.5, 1.0))  # share of pieces that are not words of TEXTS
        text = ""
        while len(text) < length:
            if chance.random() >= strange:
                text += chance.choice(words) + " "
            elif chance.random() < 0.3:
                text += chance.choice(EMOJI)
            else:
                text += "".join(chance.choices(chance.choice(SCRIPTS), k=chance.randint(1, 6)))
        found.append(text[: max(1, int(length))])
    return found


def good_requests(place: Place, bundle: Path, texts: list[str], count: int, seed: int = 0) -> list[Asked]:
    """Requests of one text or of several with the answers of `Pipeline`."""
    chance = random.Random(seed)
    pipeline, path = Pipeline(bundle, threads=1), endpoint(bundle)
    entities = pipeline.manifest.task == "token-classification"
    found = []
    for _ in range(count):
        text: str | list[str] = chance.choice(texts)
        if chance.random() < 0.3:
            text = chance.choices(texts, k=chance.randint(1, MOST_TEXTS))
        options: dict[str, Any] = {}
        if entities and chance.random() < 0.5:
            options = {
                "offsets": chance.choice(("codepoints", "utf16", "utf8")),
                "min_score": chance.choice((0.0, 0.5, 0.9)),
            }
        elif not entities and chance.random() < 0.5:
            options = {"top_k": chance.randint(1, 5)}
        answer: Any = pipeline(text, **options)
        right = json.loads(msgspec.json.encode(answer if isinstance(text, list) else [answer]))
        found.append(Asked(post(place, path, text_body(text, model=pipeline.manifest.name, **options)), 200, right))
    return found


def bad_requests(place: Place, limits: Limits) -> list[Asked]:
    """Bad requests with the status of each."""
    path = "/v1/entities"
    return [
        Asked(post(place, path, b"{"), 400),
        Asked(post(place, path, b"\xff\xfe"), 400),
        Asked(post(place, path, b""), 400),
        Asked(post(place, path, b'"fly to Rome"'), 422),
        Asked(post(place, path, b'{"text": "half of a pair: \\ud83d"}'), 422),
        Asked(post(place, path, b'{"text": []}'), 422),
        Asked(post(place, path, b'{"text": 3}'), 422),
        Asked(post(place, path, b'{"text": ["fly", null]}'), 422),
        Asked(post(place, path, b'{"text": "fly", "min_score": 2}'), 422),
        Asked(post(place, path, b'{"text": "fly", "surprise": 1}'), 422),
        Asked(post(place, path, b'{"text": "fly", "model": "no such model"}'), 404),
        Asked(post(place, "/v1/nothing", b"{}"), 404),
        Asked(post(place, path, b"text=fly", "application/x-www-form-urlencoded"), 415),
        Asked(post(place, path, text_body(["fly"] * (limits.texts + 1))), 413),
        Asked(post(place, path, text_body("fly " * (limits.text_characters // 4 + 1))), 413),
        Asked(post(place, path, text_body("f" * limits.body_bytes)), 413),
        Asked(f"GET {path} HTTP/1.1\r\nHost: {place.host}:{place.port}\r\n\r\n".encode(), 405),
    ]
