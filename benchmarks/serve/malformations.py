"""Random malformed requests of many kinds, reproducible by seed; `malformed.py` sends them."""

import gzip
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

JSON = "application/json"
OCTETS = "application/octet-stream"
INFER = "/v2/models/intents/infer"

# Right requests by path; the model names are those of `small_server.py`.
RIGHT: dict[str, dict[str, Any]] = {
    "/v1/entities": {"text": ["fly to rome", "😀 new york"], "min_score": 0.1, "offsets": "utf16"},
    "/v1/classify": {"text": "i love it", "text_pair": "refund", "top_k": 2},
    "/v1/relations": {
        "items": [{"text": "fly from rome to oslo", "head": {"start": 0, "end": 3}, "tail": {"start": 9, "end": 13}}]
    },
    INFER: {"inputs": [{"name": "text", "shape": [2], "datatype": "BYTES", "data": ["love", "refund 😀"]}]},
}
# Values of wrong types.
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 2**70, -(2**63), 1.5, 1e308, "", "x", "\x00", [], [[]], [None], ["a", 1], [["a"]], {}, {"a": {}},
)  # fmt: skip


@dataclass(frozen=True)
class Malformed:
    """Bytes for one connection. `answered`: the server must answer; otherwise it may also wait or close the connection.

    `endless`: the request announces more bytes, and its connection stays open while others are used.
    """

    raw: bytes
    answered: bool = True
    endless: bool = False


def request(path: str, body: bytes, kind: str = JSON, *headers: str, method: str = "POST") -> bytes:
    """One whole HTTP request."""
    head = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close"]
    head += [f"Content-Type: {kind}", *headers, f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(head).encode("latin-1") + body


def right(path: str) -> bytes:
    """A right request at `path`."""
    return request(path, json.dumps(RIGHT[path], ensure_ascii=False).encode())


def _path(chance: Random) -> str:
    return chance.choice(list(RIGHT))


def _changed(chance: Random, change: Callable[[dict[str, Any]], object]) -> bytes:
    path = _path(chance)
    asked = json.loads(json.dumps(RIGHT[path]))
    change(asked)
    return request(path, json.dumps(asked).encode())


def not_json(chance: Random) -> Malformed:
    """Any bytes, or JSON that is truncated, doubled or in another encoding."""
    whole = json.dumps(RIGHT[_path(chance)])
    bodies = (
        chance.randbytes(chance.randrange(200)), whole[: chance.randrange(len(whole))].encode(), (whole + whole).encode(),
        whole.encode("utf-16"), b"\xef\xbb\xbf" + whole.encode(), b"text=rome", b"'" + whole.encode() + b"'", b"\x00" * 9,
    )  # fmt: skip
    return Malformed(request(_path(chance), chance.choice(bodies)))


def wrong_types(chance: Random) -> Malformed:
    """A value of another type in a field or inside one."""

    def change(asked: dict[str, Any]) -> None:
        place: Any = asked
        while True:
            key = chance.choice(list(place)) if isinstance(place, dict) else chance.randrange(len(place))
            if not (isinstance(place[key], dict | list) and place[key] and chance.random() < 0.7):
                break
            place = place[key]
        place[key] = chance.choice(VALUES)

    return Malformed(_changed(chance, change))


def other_documents(chance: Random) -> Malformed:
    """JSON that is not an object with the fields."""
    return Malformed(request(_path(chance), json.dumps(chance.choice(VALUES)).encode()))


def empty_list(chance: Random) -> Malformed:
    """No text at all."""
    path = _path(chance)
    name = {"/v1/relations": "items", INFER: "inputs"}.get(path, "text")
    return Malformed(request(path, json.dumps({name: []}).encode()))


def many_texts(chance: Random) -> Malformed:
    """Ten thousand texts."""
    path = chance.choice(["/v1/entities", "/v1/classify"])
    return Malformed(request(path, json.dumps({"text": ["a"] * 10_000}).encode()))


def huge_numbers(chance: Random) -> Malformed:
    """Numbers that no machine word holds."""
    number = chance.choice(
        ["1e999", "-1e999", "9" * 4000, "0." + "1" * 4000, "NaN", "-Infinity", "1E+400", "18446744073709551616"]
    )
    path, body = chance.choice(
        [
            ("/v1/entities", '{"text": "a", "min_score": %s}'),
            ("/v1/classify", '{"text": "a", "top_k": %s}'),
            ("/v1/relations", '{"text": "a b", "head": {"start": 0, "end": %s}, "tail": {"start": 2, "end": 3}}'),
            (INFER, '{"inputs": [{"name": "input_ids", "shape": [1, 1], "datatype": "INT64", "data": [%s]}]}'),
            (INFER, '{"inputs": [{"name": "text", "shape": [%s], "datatype": "BYTES", "data": ["a"]}]}'),
            (
                INFER,
                '{"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a"]}], "parameters": {"top_k": %s}}',
            ),
        ]
    )
    return Malformed(request(path, (body % number).encode()))


def huge_declared(chance: Random) -> Malformed:
    """A body with a Content-Length of megabytes or more, of which only a few bytes are sent."""
    size = chance.choice([1_000_001, 10**9, 10**15, 10**30])
    raw = request(_path(chance), b"").replace(b"Content-Length: 0", b"Content-Length: %d" % size)
    return Malformed(raw + b'{"text": "', answered=size < 10**18)


@cache
def _megabytes() -> bytes:
    return b'{"text": "%s"}' % (b"a" * 1_200_000)


def huge_sent(chance: Random) -> Malformed:
    """A body of over a megabyte, sent to its end."""
    return Malformed(request(_path(chance), _megabytes()))


def huge_chunked(chance: Random) -> Malformed:
    """The same, chunked, without a Content-Length."""
    chunk = b"%x\r\n%s\r\n" % (len(_megabytes()), _megabytes())
    return Malformed(_chunked(_path(chance)) + chunk + b"0\r\n\r\n")


def _chunked(path: str) -> bytes:
    return request(path, b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")


@cache
def _bomb() -> bytes:
    return gzip.compress(b" " * 20_000_000)


def gzip_bomb(chance: Random) -> Malformed:
    """20 MB, compressed to 20 kB."""
    coding = chance.choice(["gzip", "x-gzip", "deflate", "br", "gzip, gzip", "GZIP"])
    return Malformed(request(_path(chance), _bomb(), JSON, f"Content-Encoding: {coding}"))


def deep_nesting(chance: Random) -> Malformed:
    """Lists in lists, or objects in objects, closed or not."""
    depth = chance.choice([50, 1_000, 100_000])
    opened, closed = chance.choice([("[", "]"), ('{"a":', "}")])
    nested = opened * depth + ("1" + closed * depth if chance.random() < 0.5 else "")
    name = chance.choice(["text", "items", "inputs", "parameters", "head", "x"])
    inside = chance.choice([f'{{"{name}": {nested}}}', nested, f'{{"inputs": [{{"name": "text", "data": {nested}}}]}}'])
    return Malformed(request(_path(chance), inside.encode()))


def lone_surrogates(chance: Random) -> Malformed:
    """Half a surrogate pair, escaped or in bytes."""
    half = chance.choice([b"\\ud83d", b"\\udc00", b"a\\uDBFFb", b"\xed\xa0\xbd", b"\\ud83d\\ud83d"])
    body = json.dumps(RIGHT[path := _path(chance)], ensure_ascii=False).encode()
    place = chance.choice([i for i, byte in enumerate(body) if byte == ord('"')]) + 1
    return Malformed(request(path, body[:place] + half + body[place:]))


def nul(chance: Random) -> Malformed:
    """NUL as an escape (a valid character), in bytes, in the path and in a header."""
    path = _path(chance)
    body = json.dumps(RIGHT[path]).encode()
    place = chance.randrange(len(body))
    return chance.choice(
        [
            Malformed(request("/v1/entities", b'{"text": "ro\\u0000me"}')),
            Malformed(request(path, body[:place] + b"\x00" + body[place:])),
            Malformed(request(path + "\x00", body)),
            Malformed(request(path + "%00", body)),
            Malformed(request(path, body, JSON, "X-Request-Id: a\x00b")),
        ]
    )


def unknown_model(chance: Random) -> Malformed:
    """A model that does not exist, or is of another task."""
    name = chance.choice(
        ["x", "", "cities", "relations", "../intents", "/etc/passwd", "a" * 5000, "\x00", "😀", "'", "{}"]
    )
    path = chance.choice(["/v1/entities", "/v1/classify", "/v1/relations"])
    return Malformed(request(path, json.dumps({**RIGHT[path], "model": name}).encode()))


def unknown_field(chance: Random) -> Malformed:
    """A field too many, or one too few."""
    name = chance.choice(["txt", "", "__class__", "text ", "TEXT", "a" * 3000, "`", "$.text", "\x00", "😀"])
    if chance.random() < 0.3:
        return Malformed(_changed(chance, lambda asked: asked.pop(chance.choice(list(asked)))))
    return Malformed(_changed(chance, lambda asked: asked.update({name: 1})))


def odd_offsets(chance: Random) -> Malformed:
    """Parts outside the text, reversed, overlapping, or that end inside a character."""
    numbers = [-1, 0, 1, 2, 3, 7, 12, 2**31, 2**63, 2**64]
    head, tail = ({"start": chance.choice(numbers), "end": chance.choice(numbers)} for _ in range(2))
    asked = {"text": chance.choice(["", "a", "😀😀 a", "rome in italy", "[E1] a [/E1]"]), "head": head, "tail": tail}
    asked["offsets"] = chance.choice(["codepoints", "utf16", "utf8"])
    return Malformed(
        request("/v1/relations", json.dumps({"items": [asked]} if chance.random() < 0.3 else asked).encode())
    )


def invalid_utf8(chance: Random) -> Malformed:
    """Bytes that are not UTF-8 inside right JSON."""
    path = _path(chance)
    body = json.dumps(RIGHT[path], ensure_ascii=False).encode()
    bad = chance.choice([b"\xff", b"\xc0\x80", b"\xf8\x88\x80\x80\x80", b"\xe2\x82", b"\x80"])
    place = chance.randrange(len(body))
    return Malformed(request(path, body[:place] + bad + body[place:]))


def truncated(chance: Random) -> Malformed:
    """A right request that is truncated; the client closes the connection."""
    raw = right(_path(chance))
    return Malformed(raw[: chance.randrange(len(raw))], answered=False)


def endless(chance: Random) -> Malformed:
    """A body that never ends, or never begins."""
    path = _path(chance)
    waiting = request(path, b"").replace(b"Content-Length: 0", b"Content-Length: 1000")
    return Malformed(chance.choice([_chunked(path) + b'5\r\n{"tex\r\n', waiting, waiting + b'{"text']), False, True)


def bad_heads(chance: Random) -> Malformed:
    """Invalid or unusual HTTP."""
    body = json.dumps(RIGHT[path := _path(chance)]).encode()
    whole = request(path, body)
    line, _, rest = whole.partition(b"\r\n")
    heads = [
        b"\r\n\r\n\r\n", chance.randbytes(chance.randrange(1, 400)) + b"\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00",
        line.replace(b"HTTP/1.1", b"HTTP/9.9") + b"\r\n" + rest, line.replace(b"HTTP/1.1", b"") + b"\r\n" + rest,
        line.replace(b"POST", b"P\xc3\x96ST") + b"\r\n" + rest, line.replace(b" /", b"  /") + b"\r\n" + rest,
        line + b"\r\nno colon here\r\n" + rest, line + b"\r\n: no name\r\n" + rest, line + b"\r\nX: " + b"a" * 200_000 + b"\r\n" + rest,
        line + b"\r\n" + b"".join(b"X-%d: a\r\n" % i for i in range(3000)) + rest, line + b"\r\nX-Request-Id: \xff\xfe\r\n" + rest,
        whole.replace(b"Content-Length: ", b"Content-Length: -"), whole.replace(b"Content-Length: ", b"Content-Length: x"),
        whole.replace(b"Content-Length: ", b"Content-Length: 5\r\nContent-Length: "),
        whole.replace(b"Content-Length: ", b"Transfer-Encoding: chunked\r\nContent-Length: "),
        _chunked(path) + b"zz\r\n" + body, _chunked(path) + b"-5\r\nabcde\r\n0\r\n\r\n", _chunked(path) + b"ffffffffffffffffff\r\na",
        whole.replace(b"Host: localhost\r\n", b""), whole.replace(b"\r\n", b"\n"), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        whole.replace(b"Connection: close", b"Connection: Upgrade\r\nUpgrade: websocket"), b"GET " + b"/a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        whole.replace(b"Connection: close", b"Expect: 100-continue\r\nConnection: close"), b"CONNECT a:80 HTTP/1.1\r\n\r\n",
    ]  # fmt: skip
    return Malformed(chance.choice(heads), answered=False)


def path_tricks(chance: Random) -> Malformed:
    """Paths that lead outside a folder, and unusual spellings of paths."""
    up = chance.choice(
        ["../", "..%2f", "%2e%2e%2f", "..%5c", "....//", "%252e%252e%252f", "..;/", "%c0%ae%c0%ae/", "\\..\\"]
    )
    paths = [
        f"/v2/models/{up * chance.randrange(1, 6)}etc/infer", f"/v2/models/{up}{up}etc%2fpasswd", f"/{up * 8}etc/passwd",
        f"/v2/models/intents/versions/{up}manifest.json", f"/v2/models/intents/versions/{up}/infer", f"/v1/{up}v1/entities",
        "//v1/entities", "/v1/entities/", "/v1//entities", "/V1/ENTITIES", "/v1/entities?x=%00", "/v1/entities#a", "/%", "/%zz", "*",
        "http://elsewhere/v1/entities", "/v2/models//infer", "/v2/models/%20/infer", "/v2/models/%F0%9F%98%80", "/v2/models/%ff/ready",
        f"/v2/models/{'a' * 3000}/infer", "/v1/entities;a=b", "/v2/models/intents%00/infer", "/v2/models/{name}/infer", "/docs/..", "/.",
    ]  # fmt: skip
    body = json.dumps(RIGHT[INFER]).encode()
    return Malformed(request(chance.choice(paths), body, method=chance.choice(["GET", "POST"])), answered=False)


def other_media(chance: Random) -> Malformed:
    """A right body with a wrong Content-Type, or another method."""
    body = json.dumps(RIGHT[path := _path(chance)]).encode()
    if chance.random() < 0.5:
        return Malformed(
            request(
                path, body, method=chance.choice(["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "HEAD", "FOO"])
            )
        )
    kinds = [
        "text/plain",
        "application/jsonx",
        "multipart/form-data; boundary=a",
        ";",
        "application/x-www-form-urlencoded",
        "*/*",
    ]
    return Malformed(request(path, body, chance.choice(kinds)))


def wrong_tensors(chance: Random) -> Malformed:
    """Shapes, datatypes and data that do not match."""
    rows, tokens = chance.randrange(4), chance.randrange(40)
    tensor = {
        "name": chance.choice(["text", "text_pair", "input_ids", "attention_mask", "token_type_ids", "x"]),
        "shape": chance.choice([[rows], [rows, tokens], [], [2**62, 4], [-1], [1, 1, 1], ["1"]]),
        "datatype": chance.choice(["BYTES", "INT64", "FP32", "", "int64"]),
        "data": chance.choice(
            [["a"] * rows, [[1] * tokens] * rows, [1] * tokens, [chance.getrandbits(62)], [[1, 2], [3]], "a", {}]
        ),
        "parameters": chance.choice([{}, {"binary_data_size": chance.choice([-1, 0, 8, 2**70, "8"])}, {"a": 1}]),
    }
    ids = {
        "name": "input_ids",
        "shape": [1, 1],
        "datatype": "INT64",
        "data": [chance.choice([-1, 0, 22, 23, 2**31, 2**62])],
    }
    return Malformed(
        request(INFER, json.dumps({"inputs": chance.choice([[tensor], [tensor, ids], [ids], [tensor] * 3])}).encode())
    )


def wrong_bytes(chance: Random) -> Malformed:
    """Binary tensors after the JSON, with wrong lengths."""
    behind = chance.choice(
        [b"\4\0\0\0rome", struct.pack("<q", chance.getrandbits(62)), chance.randbytes(chance.randrange(40))]
    )
    name, datatype = chance.choice([("text", "BYTES"), ("input_ids", "INT64")])
    shape = [1] if datatype == "BYTES" else [1, 1]
    size = chance.choice([len(behind), len(behind) + chance.randrange(-3, 4), 0, 2**40])
    tensor = {"name": name, "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": chance.random() < 0.5}}).encode()
    length = chance.choice([str(len(head)), str(len(head) + chance.randrange(-9, 9)), "0", "-1", "x", "9" * 30, "٣"])
    header = f"Inference-Header-Content-Length: {length.encode().decode('latin-1')}"
    return Malformed(request(INFER, head + behind, OCTETS, header))


def mutated(chance: Random) -> Malformed:
    """A right request with some bytes changed, removed or doubled."""
    raw = bytearray(right(_path(chance)))
    for _ in range(chance.randrange(1, 6)):
        place = chance.randrange(len(raw))
        what = chance.randrange(4)
        if what == 0:
            raw[place] = chance.randrange(256)
        elif what == 1:
            raw[place] ^= 1 << chance.randrange(8)
        elif what == 2:
            del raw[place : place + chance.randrange(1, 9)]
        else:
            raw[place:place] = raw[place : place + chance.randrange(1, 9)]
    return Malformed(bytes(raw), answered=False)


# Each kind with its relative frequency, which is low where one request costs a megabyte.
KINDS: dict[Callable[[Random], Malformed], float] = {
    not_json: 3, wrong_types: 4, other_documents: 2, empty_list: 1, many_texts: 0.3, huge_numbers: 3, huge_declared: 1,
    huge_sent: 0.2, huge_chunked: 0.2, gzip_bomb: 0.5, deep_nesting: 1, lone_surrogates: 2, nul: 2, unknown_model: 2,
    unknown_field: 2, odd_offsets: 3, invalid_utf8: 2, truncated: 2, endless: 0.1, bad_heads: 4, path_tricks: 4,
    other_media: 2, wrong_tensors: 4, wrong_bytes: 4, mutated: 8,
}  # fmt: skip
