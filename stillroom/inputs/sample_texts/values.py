"""Values for the slots of a support message: names, numbers, dates and amounts, each from the pool of its own split.

The lists of `values.toml` are dealt out by position, so a value of one labelled split is never in another. Numbers, dates
and amounts are dealt out by arithmetic. Only the sentence around a slot decides its meaning: one list fills people and
cities, the same dates fill order and delivery dates, the same digits fill orders and tickets.
"""

import random
import tomllib
import unicodedata
from collections.abc import Callable, Sequence
from importlib.resources import files
from string import ascii_lowercase
from typing import Literal, NamedTuple, TypeVar

Share = Literal["train", "unlabelled", "validation", "test"]
T = TypeVar("T")


# Share -> positions modulo 9 of its values: four for train, two for unlabelled text, one for validation, two for test.
DEALT: dict[Share, tuple[int, ...]] = {"train": (0, 2, 4, 6), "unlabelled": (1, 5), "validation": (7,), "test": (3, 8)}

POOLS: dict[str, list[str]] = tomllib.loads(files(__package__).joinpath("values.toml").read_text(encoding="utf-8"))


class Value(NamedTuple):
    """A slot's value. `before` precedes it and is not part of the entity: "on " before a date, "Ms " before a surname."""

    text: str
    before: str = ""


def dealt(values: Sequence[T], share: Share) -> list[T]:
    """The part of `values` that belongs to `share`; shares do not overlap if `values` holds nothing twice."""
    return [value for position, value in enumerate(values) if position % 9 in DEALT[share]]


def number(rng: random.Random, share: Share, low: int, high: int) -> int:
    """A whole number in [low, high) that no other share draws from the same range (9 numbers or more)."""
    nines = rng.randrange((high - low) // 9)
    return low + 9 * nines + rng.choice(DEALT[share])


def person(rng: random.Random, share: Share) -> Value:
    """A given name, a full name, or a title and a surname; about a third of the given names are also cities."""
    given = rng.choice(dealt(POOLS["names_and_cities" if rng.random() < 0.35 else "given_names"], share))
    surname = rng.choice(dealt(POOLS["surnames"], share))
    form = rng.random()
    if form < 0.45:
        return Value(given)
    if form < 0.85:
        return Value(f"{given} {surname}")
    return Value(surname, before=rng.choice(POOLS["titles"]) + " ")


def city(rng: random.Random, share: Share) -> Value:
    """A city; two in five are also given names."""
    return Value(rng.choice(dealt(POOLS["names_and_cities" if rng.random() < 0.4 else "cities"], share)))


def product(rng: random.Random, share: Share) -> Value:
    """A thing the shop sells, with or without a quality, a maker and a model number."""
    brand, thing = rng.choice(dealt(POOLS["brands"], share)), rng.choice(dealt(POOLS["things"], share))
    quality, model = rng.choice(POOLS["qualities"]), rng.choice(POOLS["models"])
    forms = [thing, f"{quality} {thing}", f"{brand} {thing}", f"{brand} {model} {thing}", f"{brand} {model}"]
    return Value(rng.choices(forms, weights=[3, 2, 3, 1, 3])[0])


def plan(rng: random.Random, share: Share) -> Value:
    """A tariff: a plan's word or a maker's name, mostly with a size."""
    name = rng.choice(dealt(POOLS["brands" if rng.random() < 0.35 else "plans"], share))
    # A maker's name alone does not read as a tariff, so only a plan's own word may be without a size.
    if name in POOLS["plans"] and rng.random() < 0.3:
        return Value(name)
    return Value(f"{name} {rng.choice(POOLS['plan_sizes'])}")


def order_number(rng: random.Random, share: Share) -> Value:
    """An order's number: six digits of this share, in a form that all shares use or in one of its own."""
    digits = number(rng, share, 100_000, 1_000_000)
    own: dict[Share, str] = {
        "train": f"ORD-{digits}",
        "unlabelled": f"W{digits}",
        "validation": f"{digits}-EU",
        "test": f"SO-{digits}",
    }
    everywhere = [f"{digits}", f"#{digits}", f"{str(digits)[:3]}-{str(digits)[3:]}", f"A{digits}B"]
    return Value(rng.choice([*everywhere, own[share]]))


def phone(rng: random.Random, share: Share) -> Value:
    """A telephone number from the ranges that regulators reserve for fiction."""
    last = number(rng, share, 100, 199)  # 555-0100 to 555-0199 are never assigned
    own: dict[Share, str] = {
        "train": f"07700 900{last}",
        "unlabelled": f"020 7946 0{last}",
        "validation": f"0117 496 0{last}",
        "test": f"01632 960{last}",
    }
    area = rng.choice(["212", "415", "312", "503"])
    return Value(
        rng.choice([f"555-0{last}", f"({area}) 555-0{last}", f"+1 {area} 555 0{last}", f"{area}5550{last}", own[share]])
    )


def email(rng: random.Random, share: Share) -> Value:
    """An address under a reserved domain, made of one of the share's names."""
    given = _ascii(rng.choice(dealt(POOLS["given_names"] + POOLS["names_and_cities"], share)))
    surname = _ascii(rng.choice(dealt(POOLS["surnames"], share)))
    year = rng.randrange(70, 100)
    local = rng.choice(
        [f"{given}.{surname}", f"{given[0]}{surname}", f"{surname}{year}", f"{given}_{year}", f"{given}-{surname}"]
    )
    return Value(f"{local}@{rng.choice(dealt(POOLS['mail_hosts'], share))}")


def date(rng: random.Random, share: Share) -> Value:
    """A day of the calendar; the value does not show what happened on that day."""
    month, day = divmod(number(rng, share, 0, 12 * 27), 27)  # days 1 to 27 exist in every month
    day += 1
    name = POOLS["months"][month]
    own: dict[Share, str] = {
        "train": f"{day}.{month + 1}.2025",
        "unlabelled": f"{day} {name[:3]} 25",
        "validation": f"{name} the {day}{_ordinal(day)}",
        "test": f"the {day}{_ordinal(day)} of {name}",
    }
    everywhere = [f"{day} {name}", f"{name} {day}", f"{name[:3]} {day}{_ordinal(day)}", f"2025-{month + 1:02}-{day:02}"]
    return Value(rng.choice([*everywhere, own[share]]))


def on_date(rng: random.Random, share: Share) -> Value:
    """A day as it follows a verb: "on 3 May", "yesterday", "on Friday morning"."""
    if rng.random() < 0.65:
        return Value(date(rng, share).text, before="on ")
    day = rng.choice(dealt(POOLS["days"], share))
    return Value(day, before="" if day.startswith(("this", "the day", "yesterday")) else "on ")


def amount(rng: random.Random, share: Share) -> Value:
    """An amount of money; the value does not show whether it is a charge or a refund."""
    units = number(rng, share, 4, 400)
    cents = rng.choice(["00", "50", "90", "95", "99"])
    own: dict[Share, str] = {
        "train": f"EUR {units}.{cents}",
        "unlabelled": f"{units},{cents} EUR",
        "validation": f"{units} quid",
        "test": f"USD {units}.{cents}",
    }
    everywhere = [f"€{units}.{cents}", f"{units}.{cents} €", f"${units}", f"£{units}.{cents}", f"{units} euros"]
    return Value(rng.choice([*everywhere, own[share]]))


def _ascii(name: str) -> str:
    """A name as in an e-mail address: `Núñez` is `nunez`, `O'Brien` is `obrien`."""
    return "".join(letter for letter in unicodedata.normalize("NFD", name.lower()) if letter in ascii_lowercase)


def _ordinal(day: int) -> str:
    return "th" if 10 < day < 14 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")


# Slot in a template -> the label of its value (None: not an entity, although it resembles one), and the function that draws it.
SLOTS: dict[str, tuple[str | None, Callable[[random.Random, Share], Value]]] = {
    "person": ("person", person),
    "city": ("city", city),
    "product": ("product", product),
    "plan": ("plan", plan),
    "order_number": ("order_number", order_number),
    "phone": ("phone", phone),
    "email": ("email", email),
    "order_date": ("order_date", date),
    "on_order_date": ("order_date", on_date),
    "delivery_date": ("delivery_date", date),
    "on_delivery_date": ("delivery_date", on_date),
    "charge": ("charge", amount),
    "refund": ("refund", amount),
    "ticket": (None, order_number),
    "other_date": (None, date),
    "on_other_date": (None, on_date),
    "other_amount": (None, amount),
}
