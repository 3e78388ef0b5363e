"""Texts from all over Unicode, for tokenizers to be compared on."""

import random
import sys
import unicodedata

# Where scripts and symbols begin; a few hundred characters from each are of its kind.
STARTS = (
    0x20, 0xA0, 0x100, 0x180, 0x250, 0x2B0, 0x300, 0x370, 0x400, 0x530, 0x590, 0x600, 0x700, 0x900, 0x980, 0xA00,
    0xB80, 0xC00, 0xD00, 0xE00, 0xF00, 0x1000, 0x10A0, 0x1100, 0x1200, 0x13A0, 0x1400, 0x1680, 0x1780, 0x1800, 0x1E00,
    0x1F00, 0x2000, 0x2070, 0x20A0, 0x2100, 0x2150, 0x2190, 0x2200, 0x2460, 0x2500, 0x2600, 0x2700, 0x2C00, 0x2D00,
    0x2E80, 0x3000, 0x3040, 0x30A0, 0x3100, 0x3200, 0x3400, 0x4E00, 0x9F00, 0xA000, 0xA640, 0xA960, 0xAC00, 0xD700,
    0xE000, 0xF900, 0xFB00, 0xFB50, 0xFE00, 0xFE70, 0xFF00, 0x10000, 0x10400, 0x10900, 0x10E60, 0x11000, 0x12000,
    0x13000, 0x1D100, 0x1D400, 0x1D7CE, 0x1E000, 0x1E900, 0x1EE00, 0x1F000, 0x1F1E6, 0x1F300, 0x1F900, 0x20000,
    0x2F800, 0x30000, 0xE0000, 0xF0000, 0x10FF00,
)  # fmt: skip
SPACES = " \t\n\r\v\f\x1c\x85\xa0\u1680\u2003\u2028\u2029\u202f\u3000\u200b\ufeff"
WORDS = (
    *("the", "don't", "DON'T", "we'll", "I'VE", "they're", "He'S", "'Tis", "ſ", "'ſ", "K's", "word_word", "snake.case"),
    *("naïve", "Straße", "ǅ", "é", "e\u0301", "ﬁ", "3.14", "1e-9", "1,000", "0x1F", "½", "²", "Ⅷ", "٣٤", "१२", "万"),
    *(
        "日本語",
        "中文",
        "한국어",
        "ไทย",
        "हिन्दी",
        "العربية",
        "עברית",
        "👩\u200d👩\u200d👧",
        "🇩🇪",
        "✌🏽",
        "😀",
        "♥\ufe0f",
    ),
    *("</s>", "<s>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<unk>", "[INST]", "<0x41>", "▁", "Ġ", "Ċ", "C:\\n"),
    *("...", "!!!", "?!", "--", "==", "{}", "(a)", "#x", "@y", "$5", "%d"),
)


def random_text(rng: random.Random) -> str:
    """A text of up to some dozens of pieces: words, runs of one character, and characters of a script or of all."""
    return "".join(_piece(rng) for _ in range(rng.randint(0, 24)))


def _piece(rng: random.Random) -> str:
    kind = rng.randrange(8)
    if kind == 0:
        return rng.choice(WORDS)
    if kind == 1:
        return " " + rng.choice(WORDS)
    if kind == 2:
        return rng.choice(SPACES) * rng.randint(1, rng.choice((2, 5, 40)))
    if kind == 3:
        return "".join(rng.choices("0123456789", k=rng.randint(1, 9)))
    if kind == 4:
        return chr(rng.randrange(0x80)) * rng.randint(1, rng.choice((2, 30)))
    if kind == 5:
        start = rng.choice(STARTS)
        return "".join(_valid(start + rng.randrange(0x80)) for _ in range(rng.randint(1, 6)))
    if kind == 6:
        return _valid(rng.randrange(sys.maxunicode + 1))
    return "".join(rng.choices("abcdeABCDE'. ,\n\u0301\u0308é", k=rng.randint(1, 8)))


def _valid(code: int) -> str:
    """The character, or a letter in the place of a surrogate or of one that Unicode has not assigned."""
    char = chr(code)
    return "x" if unicodedata.category(char) in ("Cs", "Cn") else char
