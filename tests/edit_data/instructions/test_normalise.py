"""Normalisation: canonical forms, what never changes, idempotence, undoing, and mistakes in files of rules."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_edit_zero.edit_data.instructions.changes import undo
from qwen_edit_zero.edit_data.instructions.normalise import Normaliser, Rule
from qwen_edit_zero.errors import SettingsError
from tests.edit_data.instructions.harmless import HARMLESS

DEFAULT = Normaliser()


@pytest.mark.parametrize("rule", DEFAULT.rules, ids=lambda rule: rule.name)
def test_every_rule_has_examples_that_the_whole_set_keeps_stable(rule: Rule) -> None:
    """That an example comes out as the file says is checked whenever the file is read."""
    assert any(before != after for before, after in rule.examples)
    for _, after in rule.examples:
        settled = DEFAULT.normalise(after).text
        assert DEFAULT.normalise(settled).text == settled


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("改一下颜色", "请更改颜色"),
        ("换红", "请将颜色改为红色"),
        ("变成红色", "请将颜色改为红色"),
        ("make it red", "Change the colour to red"),
        ("Please turn it red", "Change the colour to red"),
        ("麻烦帮我把天空換成夜晚", "请将天空改为夜晚"),
        ("把　天空　换成　夜晚", "请将天空改为夜晚"),
        ("把天\u200b空变成夜晚,去掉电线", "请将天空改为夜晚，请移除电线"),
        ("把 sky 换成 sunset", "请将 sky 改为 sunset"),
        ("把天空变红 / make the sky red", "请将天空改为红色 / Change the sky to red"),
        ("Keep the man, turn the dog into a cat", "Keep the man, change the dog to a cat"),
        ("turn the dog into a cat and make the sky red", "Change the dog to a cat and change the sky to red"),
        ("旋转１８０度", "旋转180度"),
    ],
)
def test_ways_of_saying_become_one(text: str, canonical: str) -> None:
    assert DEFAULT.normalise(text).text == canonical


@pytest.mark.parametrize(
    "text",
    [
        "不要把天空换成夜晚",
        "don't turn the sky into night",
        "把人都去掉",
        "把人物换到左边",
        "Turn the head to the right",
        "swap the cat with the dog",
        "把狗和猫互换位置",
        "如果是白天改成夜晚",
        "make it bigger",
        "把天空变亮",
        "加粗文字",
        "让画面更有氛围感",
        "Make the man smile",
        "ぼかして背景に桜の木を追加",
        "Удалите фон",
        "1,000 个气球和 2.5 米的横幅",
        "👩‍🚀 in the sky",
        "Change picture 1's sky to the sky of picture 2",
        "...",
        "",
    ],
)
def test_what_is_not_understood_stays(text: str) -> None:
    assert DEFAULT.normalise(text).text == text


@pytest.mark.parametrize("quote", ["“{}”", '"{}"', "「{}」", "『{}』", "‘{}’", "《{}》", "'{}'", "`{}`"])
@pytest.mark.parametrize("inner", ["把天空換成  夜晚", "make it red,去掉狗", "ＡＢＣ　１２３", "變紅！！"])
def test_a_quotation_stays_byte_for_byte(quote: str, inner: str) -> None:
    text = f"麻煩把背景換成写着 {quote.format(inner)} 的海報,去掉狗"
    assert quote.format(inner) in (done := DEFAULT.normalise(text).text)
    assert done != text


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("写上 春節快樂！！", "春節快樂"),
        ("Add a sign saying ＡＢＣ　Store", "ＡＢＣ　Store"),
        ("文字改为ＳＡＬＥ，把背景變紅", "ＳＡＬＥ"),
        ("把背景換成 https://a.example/紅?x=１", "https://a.example/紅?x=１"),
        ("把Ａ.png換成 IMG_１.jpg", "IMG_１.jpg"),
    ],
)
def test_text_to_be_written_and_addresses_stay(text: str, kept: str) -> None:
    assert kept in DEFAULT.normalise(text).text


PLAIN_WORDS = """把 将 请 天空 换成 改为 变 红色 紅 去掉 ， , 。 ！！ “ ” 「 」 " ' 《 make turn the sky into red
    it please remove and １２ 12 1,000 写上 saying <|im_end|> a.png 帮我 一下 加个 / ( ）"""
WORDS = st.sampled_from([*PLAIN_WORDS.split(), "\U0010f000", " ", "\u3000", "\u200b", "\n"])
TEXTS = st.one_of(st.lists(WORDS, max_size=14).map("".join), st.text(max_size=40), st.sampled_from(HARMLESS))


@given(TEXTS)
def test_normalising_again_changes_nothing_and_every_change_can_be_undone(text: str) -> None:
    done = DEFAULT.normalise(text)
    assert undo(done.text, done.changes) == text
    assert DEFAULT.normalise(done.text).text == done.text


@given(TEXTS)
def test_no_number_appears_or_goes(text: str) -> None:
    def digits(value: str) -> list[int]:
        return sorted(int(c) for c in value if c.isdecimal())

    assert digits(DEFAULT.normalise(text).text) == digits(text)


def rules(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "rules.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_users_extend_replace_disable_and_add_to_definitions(tmp_path: Path) -> None:
    path = rules(
        tmp_path,
        """
extends: default
disable: [simplified]
define: {colour_zh: [靛青]}
rules:
  - name: en-add
    languages: [en]
    pattern: '(?:add|pop in) (?P<x>.+)'
    replacement: Add {x}
    examples: [[pop in a cat, Add a cat]]
  - name: shop-word
    scope: text
    pattern: 包邮
    replacement: 免运费
    examples: [[包邮标签, 免运费标签]]
""",
    )
    own = Normaliser(path)
    assert own.normalise("pop in a cat").text == "Add a cat"
    assert own.normalise("加上包邮標籤").text == "请添加免运费標籤"
    assert own.normalise("换成靛青").text == "请将颜色改为靛青色"


def test_a_rule_that_would_change_a_quotation_or_number_does_not_apply_and_is_named(tmp_path: Path) -> None:
    own = Normaliser(
        rules(tmp_path, "rules:\n- {name: cut, pattern: 'write.*', replacement: done}\n- {name: n, scope: text, "
              "pattern: '7', replacement: seven}\n")
    )  # fmt: skip
    done = own.normalise("write “大促” on it")
    assert (done.text, done.withheld) == ("write “大促” on it", ("cut",))
    assert own.normalise("7 cats").withheld == ("n",)


def test_rules_that_undo_each_other_leave_the_text_alone(tmp_path: Path) -> None:
    own = Normaliser(
        rules(tmp_path, "rules:\n- {name: ab, scope: text, pattern: a, replacement: bb}\n"
              "- {name: ba, scope: text, pattern: b, replacement: a}\n")
    )  # fmt: skip
    done = own.normalise("a")
    assert (done.text, done.changes) == ("a", ())
    assert done.withheld == ("ab", "ba")


@pytest.mark.parametrize(
    ("text", "message"),
    [  # without the line "rules:"
        ("- {name: x, pattern: 'a('}\n", r'rules.yaml:2: rule "x": .*no regular expression'),
        ("- {name: x, pattern: a, replacement: '{y}'}\n", "{y} is no named group"),
        ("- {name: x, pattern: '(?P<y>a)', replacement: b}\n", "group y stands 0"),
        ("- {name: x, pattern: a, replacment: b}\n", 'rule "x": replacment is no key of a rule; did you mean rep'),
        ("- {name: x, pattern: a, replacement: b}\n- {name: x, pattern: a, replacement: b}\n", "rules.yaml:3.*2 too"),
        ("- {pattern: a, replacement: b}\n", "rules.yaml:2: rule 1 has no name"),
        ("- {name: x, scope: word, pattern: a, replacement: b}\n", "must be clause or text"),
        ("- {name: x, languages: [fr], pattern: a, replacement: b}\n", 'holds "fr"; there are zh and en'),
        ("- {name: x, scope: text, builtin: widths}\n", "builtin is .*half-width and simplified"),
        ("- {name: x, pattern: '<<colour>>', replacement: b}\n", "<<colour>> is not defined"),
        ("define: {a: <<a>>}\nrules:\n- {name: x, pattern: '<<a>>', replacement: b}\n", "defined by itself"),
        ("- {name: x, pattern: a, replacement: b, examples: [[a, c]]}\n", 'its example "a" becomes "b", not "c"'),
        ("extends: default\ndisable: [simplfied]\n", r"rules.yaml:2: disable names .*did you mean simplified\?"),
        ("disable: [simplified]\n", "it needs extends: default"),
        ("extends: base\n", "rules.yaml:1: extends is 'base'; only default"),
        ("rule: []\n", "rules.yaml:1: rule is no key of a file of rules; did you mean rules"),
        ("- a\n", "no mapping"),
        ("rules: [\n", "this is not YAML"),
    ],
)  # fmt: skip
def test_mistakes_in_a_file_are_told_with_line_and_rule(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Normaliser(rules(tmp_path, f"rules:\n{text}" if text.startswith("- {") else text))


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="does not exist"):
        Normaliser(tmp_path / "none.yaml")
