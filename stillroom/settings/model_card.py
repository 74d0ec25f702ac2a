"""What a model card states and no file of the model does: settings of `run` and `export`."""

from dataclasses import dataclass

from serve.options import setting

CARD = "Model card"


@dataclass(frozen=True, kw_only=True)
class OfCard:
    """Licences and language, as the Hub's metadata names them."""

    license: str = setting(
        "", help="Licence of the model: a short name that the Hub knows, such as apache-2.0.", panel=CARD
    )
    data_license: str = setting("", help="Licence of the data that it learned from.", panel=CARD)
    language: str = setting("", help="Language of the texts: a code that the Hub knows, such as en.", panel=CARD)
