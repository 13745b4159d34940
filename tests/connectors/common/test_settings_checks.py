"""What every connector's settings have in common is refused by the setting's name."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.connectors.common.settings_checks import check_choice, check_names, socket_of
from kvtier.errors import Invalid


def test_settings_that_do_not_exist_are_named_with_those_that_do() -> None:
    check_names("the tier", {"socket": 1}, ("namespace", "socket"))
    with pytest.raises(Invalid, match="the tier has no setting 7, sockets; there are namespace, socket"):
        check_names("the tier", {"sockets": 1, 7: 2}, ("namespace", "socket"))


@pytest.mark.parametrize("value", ["maybe", "", None, ["off"]])
def test_a_choice_is_one_of_its_words(value: Any) -> None:
    check_choice("check", "off", ("full", "off"))
    with pytest.raises(Invalid, match="check is one of full, off, not "):
        check_choice("check", value, ("full", "off"))


@pytest.mark.parametrize("value", ["", 7, None, b"/x"])
def test_a_socket_is_a_path_or_where_the_daemon_listens(value: Any) -> None:
    assert socket_of({}).endswith("kvtier.sock") and socket_of({"socket": "/x"}) == "/x"
    with pytest.raises(Invalid, match="socket is a path"):
        socket_of({"socket": value})
