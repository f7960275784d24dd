# SPDX-License-Identifier: Apache-2.0
"""What the commands with overrides share."""

import click

from dlrover.python.rl.common.names import nearest


class OverridesCommand(click.Command):
    """A command with ``key=value`` arguments: an option that it does not have is answered with the argument."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name, pairs = _written(error.option_name, given), [*given, ""]
            options = [*(option for item in self.params for option in item.opts), "help"]
            close = nearest(name.lstrip("-"), [option.lstrip("-") for option in options])
            values = [
                option.partition("=")[2] or after
                for option, after in zip(pairs, pairs[1:], strict=False)
                if option.partition("=")[0] == name
            ]
            value = next((value for value in values if value and not value.startswith("-")), "...")
            key = name.lstrip("-").replace("-", "_")
            known = f", or did you mean --{close}?" if close else ""
            message = f"no option {name}: settings are written key=value, {key}={value}{known}"
            raise click.UsageError(message, ctx) from None


def _written(option: str, args: list[str]) -> str:
    """The option as it was typed: of ``-steps=5`` click takes ``-s`` for it."""
    if option.startswith("--"):
        return option
    return next((arg.partition("=")[0] for arg in args if arg.startswith(option)), option)
