from __future__ import annotations

from shared.launch import ProcessNode, format_tree

TREE = ProcessNode(
    "HTTP",
    "s: main",
    (
        ProcessNode("controller", "s: controller", (ProcessNode("rank", "s: TP0"), ProcessNode("rank", "s: TP1"))),
        ProcessNode("text", "s: detokenizer", pid=7),
    ),
)


def test_a_tree_shows_each_process_in_its_place() -> None:
    assert format_tree(TREE).splitlines() == [
        "s: main            HTTP",
        "├─ s: controller   controller",
        "│  ├─ s: TP0       rank",
        "│  └─ s: TP1       rank",
        "└─ s: detokenizer  pid 7       text",
    ]


def test_a_tree_as_json_has_every_process_with_role_title_and_pid() -> None:
    tree = TREE.as_dict()
    assert [child["title"] for child in tree["children"][0]["children"]] == ["s: TP0", "s: TP1"]
    assert tree["children"][1] == {"role": "text", "title": "s: detokenizer", "pid": 7, "children": []}
    assert TREE.count() == 5
