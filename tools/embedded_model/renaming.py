"""Gives the speakers of a passage other names, so that a model has to read who is there instead of knowing it.

The held-out plays have speakers that the training plays lack. A model that learnt the training names by heart pays
for every one of them; one that met a new cast in every window copies the names from the lines above.
"""

import random
import re

SPEAKER = re.compile(r"(?<=\n\n)[^\n:]+(?=:\n)")
NAME = re.compile(r"\b[A-Z]{4,}\b")
# These say what a speaker is, not who.
RANKS = {"KING", "QUEEN", "PRINCE", "PRINCESS", "DUKE", "DUCHESS", "EARL", "LORD", "LORDS", "LADY", "LADIES"}
RANKS |= {"FRIAR", "FATHER", "BISHOP", "ARCHBISHOP", "CARDINAL", "MARQUESS", "LIEUTENANT", "GENTLEMEN", "MISTRESS"}
RANKS |= {"NURSE", "PAGE", "GARDENER", "ANOTHER", "BOTH"}
SEAM = re.compile("(?<=[^AEIOU])(?=[AEIOU])")  # before a vowel, after a consonant: halves cut there can be pronounced


def names_of_speakers(text: str) -> set[str]:
    return {name for speaker in SPEAKER.findall(text) for name in NAME.findall(speaker)} - RANKS


class Renamer:
    """Invents names from the beginnings and ends of those in `text`."""

    def __init__(self, text: str) -> None:
        names = sorted(names_of_speakers(text))
        self._heads = [name[: seam.start()] for name in names for seam in SEAM.finditer(name)]
        self._tails = [name[seam.start() :] for name in names for seam in SEAM.finditer(name)]

    def rename(self, passage: str, source: random.Random) -> str:
        """Return `passage` with one new name for each speaker, in the speaker lines and in the verse."""
        new_names = {}
        for name in sorted(names_of_speakers(passage)):
            new_names[name] = self._invent(source)
            new_names[name.capitalize()] = new_names[name].capitalize()
        if not new_names:
            return passage
        return re.sub(rf"\b({'|'.join(new_names)})\b", lambda match: new_names[match[0]], passage)

    def _invent(self, source: random.Random) -> str:
        return source.choice(self._heads) + source.choice(self._tails)
