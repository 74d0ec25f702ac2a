"""Labelled messages in eight languages: templates, filled with the names that Babel has of months, territories and currencies."""

import random

from babel import Locale

TEMPLATES = {
    "en": (
        "the meeting in {territory} is in {month}",
        "pay the invoice from {territory} in {currency}",
        "in {month} it costs 20 {currency}",
    ),
    "de": (
        "das Treffen in {territory} ist im {month}",
        "die Rechnung aus {territory} bitte in {currency}",
        "im {month} kostet es 20 {currency}",
    ),
    "fr": (
        "la réunion en {territory} est en {month}",
        "la facture de {territory} se paie en {currency}",
        "en {month} cela coûte 20 {currency}",
    ),
    "es": (
        "la reunión en {territory} es en {month}",
        "pague la factura de {territory} en {currency}",
        "en {month} cuesta 20 {currency}",
    ),
    "el": (
        "η συνάντηση σε {territory} είναι τον {month}",
        "το τιμολόγιο από {territory} σε {currency}",
        "τον {month} κοστίζει 20 {currency}",
    ),
    "ru": (
        "встреча в стране {territory} будет в месяце {month}",
        "счёт из страны {territory} в валюте {currency}",
        "{month} , цена 20 {currency}",
    ),
    "ar": (
        "الاجتماع في {territory} في شهر {month}",
        "ادفع فاتورة {territory} بعملة {currency}",
        "في شهر {month} السعر 20 {currency}",
    ),
    "hi": (
        "{territory} में बैठक {month} में है",
        "{territory} का बिल {currency} में दें",
        "{month} में कीमत 20 {currency} है",
    ),
}
NOTES = set("()[],.;:/0123456789&")


def names_in(language: str) -> dict[str, list[str]]:
    """The names of each kind, in a fixed order."""
    locale = Locale(language)
    kinds = {
        "month": locale.months["format"]["wide"].values(),
        "territory": [name for code, name in sorted(locale.territories.items()) if code.isalpha() and len(code) == 2],
        "currency": [name for _, name in sorted(locale.currencies.items())],
    }
    # A name with brackets, numbers or stops is a note on a name.
    return {kind: [n for n in map(str, names) if not set(n) & NOTES] for kind, names in kinds.items()}


def messages(language: str, count: int, seed: int) -> list[dict[str, object]]:
    """Messages with their entities."""
    chance, names = random.Random(f"{language} {seed}"), names_in(language)
    rows: list[dict[str, object]] = []
    while len(rows) < count:
        text, entities = "", []
        for word in chance.choice(TEMPLATES[language]).split(" "):
            kind = word.strip("{}")
            filled = chance.choice(names[kind]) if word != kind else word
            text += " " if text else ""
            if word != kind:
                entities.append({"start": len(text), "end": len(text) + len(filled), "label": kind})
            text += filled
        rows.append({"text": text, "entities": entities, "language": language})
    return rows
