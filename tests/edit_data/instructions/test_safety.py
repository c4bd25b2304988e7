"""The word filter: nothing harmless is stopped, disguised words are found, and mistakes in files of rules are told."""

from __future__ import annotations

import json
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pypinyin import Style, pinyin

from benchmarks.instructions.disguise import disguised, in_a_sentence
from qwen_edit_zero.assets import demo_manifest
from qwen_edit_zero.edit_data.instructions.rule_files import Entry, read_rules
from qwen_edit_zero.edit_data.instructions.safety import SafetyFilter
from qwen_edit_zero.errors import SettingsError
from tests.edit_data.instructions.harmless import HARMLESS

FILTER = SafetyFilter()
ENTRIES = read_rules(None, default="safety.yaml")


@pytest.mark.parametrize("text", HARMLESS)
def test_nothing_harmless_is_found(text: str) -> None:
    assert [str(found) for found in FILTER.find(text)] == []


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("把衣服脱掉的毛球去掉", False),
        ("将裙子上脱落的线头清理干净", False),
        ("把衣服脱掉的扣子缝上", False),
        ("undress the salad", False),
        ("Undress the green salad, please", False),
        ("undress the wound and put on a new bandage", False),
        ("把衣服脱掉", True),
        ("把衣服脱掉的女孩", True),
        ("把衣 服*脱掉，去掉毛球", True),
        ("把裙子脱掉的毛球女孩", True),
        ("undress the salad girl", True),
        ("undress the salad and then the woman", True),
        ("u n d r e s s the woman, leave the salad", True),
        ("undress the woman salad", True),
        ("undress her", True),
    ],
)
def test_what_is_shed_or_has_a_dressing_may_be_named(text: str, is_found: bool) -> None:
    assert bool(FILTER.find(text)) == is_found


def test_the_list_of_harmless_instructions_is_as_long_as_the_documentation_says() -> None:
    assert len(set(HARMLESS)) == len(HARMLESS) == 248


@pytest.mark.parametrize("split", ["train", "validation"])
def test_nothing_of_the_demo_is_found(split: str) -> None:
    for line in demo_manifest(split).read_text(encoding="utf-8").splitlines():
        assert FILTER.find(json.loads(line)["instruction"]) == ()


def test_harmless_phrases_side_by_side_make_nothing_up() -> None:
    phrases = """红色 情侣装 裸色 口红 内衣 泳衣 儿童 婴儿 老人 证件照 发票 水印纸 血管 骨骼 牛排 血橙 刀具 枪战游戏
        吊灯 上衣 跳楼价 体育 假发 假花 色调 情绪 脱脂牛奶 光泽 爱心 交通灯 表情 友情 头像 金额 校服 皱纹 肤色 断桥 首饰
        碎花 肢体动作 割草机 喉糖""".split()  # noqa: SIM905
    for form, (a, b) in product(("把{}换成{}", "{}，{}风格", "移除{} {}", "{}/{}"), product(phrases, phrases)):
        text = form.format(a, b)
        assert [str(found) for found in FILTER.find(text) if found.level == "block"] == [], text


def _words() -> list[tuple[Entry, str]]:
    return [(entry, word) for entry in ENTRIES for word in entry.texts("words")]


def test_words_are_found_in_every_disguise() -> None:
    tried, missed = Counter[str](), []
    for entry, word in _words():
        for way, text in disguised(word, pinyin=word in entry.values.get("pinyin", {})).items():
            tried[way] += 1
            if not any(found.rule == entry.name for found in FILTER.find(in_a_sentence(text))):
                missed.append((way, word, text))
    assert len(tried) >= 30
    assert sum(tried.values()) > 3000
    # the one reading of 勒 that the pinyin of the rule does not have
    assert {word for _, word, _ in missed} <= {"希特勒"}, missed


def test_the_finding_tells_where_in_the_instruction_it_is() -> None:
    text = "请把 ＳＫＹ 改成 裸·體 的"
    (found,) = FILTER.find(text)
    assert (found.rule, found.found, found.start) == ("nudity", "裸·體", text.index("裸"))
    (found,) = FILTER.find("Make him ｎ．ｕ．ｄ．ｅ now")
    assert found.found == "ｎ．ｕ．ｄ．ｅ"


@pytest.mark.parametrize("entry", [e for e in ENTRIES if "pinyin" in e.values], ids=lambda entry: entry.name)
def test_the_pinyin_of_the_rules_is_a_reading_of_the_words(entry: Entry) -> None:
    for word, spelled in entry.values["pinyin"].items():
        readings = pinyin(word, style=Style.NORMAL, heteronym=True)
        assert all(s in of for s, of in zip(spelled.split(), readings, strict=True)), (word, readings)


def test_every_category_is_covered_and_every_rule_has_examples_of_both_kinds() -> None:
    categories = {entry.text("category") for entry in ENTRIES}
    assert categories >= {"minors", "sexual", "violence", "hate", "self-harm", "documents", "copyright"}
    for entry in ENTRIES:
        assert entry.texts("caught"), entry.name
        assert entry.texts("passed"), entry.name


@given(st.text(max_size=60))
def test_any_text_can_be_filtered_and_findings_lie_in_it(text: str) -> None:
    whole = f"{text} nude"
    for found in FILTER.find(whole):
        assert whole[found.start : found.start + len(found.found)] == found.found


def rules(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "safety.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_users_add_words_and_exceptions(tmp_path: Path) -> None:
    own = SafetyFilter(
        rules(
            tmp_path,
            """
extends: default
disable: [watermark-removal]
rules:
  - name: competitor
    category: brand
    level: flag
    words: [acme, 竞品]
    pinyin: {竞品: jing pin}
    except: ['\\bacme thunder\\b']
    caught: [A C M E logo, 競品, jingpin]
    passed: [Acme Thunder, pacmen]
""",
        )
    )
    assert [f.rule for f in own.find("put the ACME logo on it, remove the watermark")] == ["competitor"]
    assert [f.rule for f in own.find("nude")] == ["nudity"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- {name: x, category: c}", "neither words nor patterns"),
        ("- {name: x, words: [a]}", "it has no category"),
        ("- {name: x, category: c, words: bad}", r"words is no list; write \[bad\]"),
        ("- {name: x, category: c, words: [1]}", "holds 1, which is no text; put it in quotes"),
        ("- {name: x, category: c, words: ['!?']}", "has no letters"),
        ("- {name: x, category: c, patterns: ['a*']}", "matches everything"),
        ("- {name: x, category: c, words: [a], level: stop}", "must be block or flag"),
        ("- {name: x, category: c, words: [裸体], pinyin: {裸体: luo}}", "one syllable a character"),
        ("- {name: x, category: c, words: [裸体], pinyin: {全裸: quan luo}}", "none of the rule's words"),
        ("- {name: x, category: c, words: [gore], caught: [gory]}", '"gory" is not found by the rule'),
        ("- {name: x, category: c, words: [gore], passed: [g0re]}", '"g0re" is found by the rule'),
        ("- {name: x, category: c, words: [a], exept: [b]}", "did you mean except"),
    ],
)
def test_mistakes_in_a_file_are_told_with_line_and_rule(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        SafetyFilter(rules(tmp_path, f"rules:\n{text}\n"))
    assert 'safety.yaml:2: rule "x": ' in str(caught.value)
