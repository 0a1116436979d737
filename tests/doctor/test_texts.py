"""Every check has all its texts in every language, with the same placeholders."""

import string

from redline.doctor import CHECKS, LANGUAGES, texts_of
from redline.doctor.messages import PARTS, phrases, table


def placeholders(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


def test_every_check_has_texts() -> None:
    for lang in LANGUAGES:
        assert set(table(lang)) == {each.id for each in CHECKS}
        for each in CHECKS:
            assert all(texts_of(each.id, "", lang)[part] for part in PARTS)


def test_languages_agree() -> None:
    english, chinese = table("en"), table("zh")
    assert phrases("en").keys() == phrases("zh").keys()
    for name, text in phrases("en").items():
        assert placeholders(text) == placeholders(phrases("zh")[name]), name
    for id, texts in english.items():
        assert texts.keys() == chinese[id].keys(), id
        for part, text in texts.items():
            other = chinese[id][part]
            pairs = [(text, other)] if isinstance(text, str) else [(text[name], other[name]) for name in text]
            for one, two in pairs:
                assert placeholders(two) <= placeholders(one), (id, part)


def test_texts_are_ascii_in_english() -> None:
    for texts in table("en").values():
        for text in texts.values():
            assert str(text).isascii()
