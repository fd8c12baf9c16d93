import pytest

from records import code_hash

CODE = "def f(x):\n    return x + 1\n"


@pytest.mark.parametrize(
    "same",
    [
        "def f(x):  # why\n\n    return x + 1   \n",
        'def f(x):\n    """What.\n\n    More.\n    """\n    return x + 1\n',
        '"""Module."""\n\n\n# --8<-- [start:f]\ndef f(x):\n    return x + 1\n# --8<-- [end:f]\n',
    ],
)
def test_words_do_not_make_a_record_stale(same):
    assert code_hash(same) == code_hash(CODE)


@pytest.mark.parametrize(
    "other",
    [
        CODE.replace("1", "2"),
        CODE.replace("    return", "  return"),
        'def f(x):\n    "#"\n    y = "# not a comment"\n    return x + 1\n',
        CODE + "f(0)\n",
    ],
)
def test_code_does(other):
    assert code_hash(other) != code_hash(CODE)
