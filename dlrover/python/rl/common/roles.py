"""Role names: five that everyone knows, open to the user's own."""

import re
from typing import ClassVar

_ROLE = re.compile(r"[A-Z][A-Z0-9_]*")


def is_role_name(name: str) -> bool:
    """Whether ``name`` is a letter followed by letters, digits and underscores."""
    return _ROLE.fullmatch(str(name).upper()) is not None


class RLRoleType(str):
    """The name of a role, always upper case: ``RLRoleType("actor") == "ACTOR"``.

    The five roles of the integration guide are constants; any other valid name is a role too. It is a ``str``, so a
    mapping keyed by roles can be read with either.

    Raises:
        ValueError: the name is not a letter followed by letters, digits and underscores.
    """

    __slots__ = ()

    ACTOR: ClassVar["RLRoleType"]
    ROLLOUT: ClassVar["RLRoleType"]
    REWARD: ClassVar["RLRoleType"]
    REFERENCE: ClassVar["RLRoleType"]
    CRITIC: ClassVar["RLRoleType"]

    def __new__(cls, name: str) -> "RLRoleType":
        upper = str(name).upper()
        if not is_role_name(upper):
            raise ValueError(f"'{name}' is not a role name: use letters, digits and '_', starting with a letter")
        return super().__new__(cls, upper)

    @property
    def name(self) -> str:
        """The role's name, as an enum member would give it."""
        return str(self)

    @property
    def value(self) -> str:
        """The role's name, as an enum member would give it."""
        return str(self)

    def __repr__(self) -> str:
        return f"RLRoleType.{self}"


RLRoleType.ACTOR = RLRoleType("ACTOR")
RLRoleType.ROLLOUT = RLRoleType("ROLLOUT")
RLRoleType.REWARD = RLRoleType("REWARD")
RLRoleType.REFERENCE = RLRoleType("REFERENCE")
RLRoleType.CRITIC = RLRoleType("CRITIC")

WELL_KNOWN_ROLES = (
    RLRoleType.ACTOR,
    RLRoleType.ROLLOUT,
    RLRoleType.REWARD,
    RLRoleType.REFERENCE,
    RLRoleType.CRITIC,
)
