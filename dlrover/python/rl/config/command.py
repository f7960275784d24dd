# SPDX-License-Identifier: Apache-2.0
"""A command with overrides; without the reader of job files, so that commands start quickly."""

import click

from dlrover.python.rl.common.names import nearest


class OverridesCommand(click.Command):
    """A command with ``key=value`` arguments, which it suggests in place of an unknown option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        typed = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name, pairs = error.option_name, [*typed, ""]
            if not name.startswith("--"):  # click names ``-s`` for ``-steps=5``
                name = next((arg.partition("=")[0] for arg in typed if arg.startswith(name)), name)
            options = [*(option for item in self.params for option in item.opts), "help"]
            close = nearest(name.lstrip("-"), [option.lstrip("-") for option in options])
            values = [
                option.partition("=")[2] or after
                for option, after in zip(pairs, pairs[1:], strict=False)
                if option.partition("=")[0] == name
            ]
            value = next((value for value in values if value and not value.startswith("-")), "...")
            key = name.lstrip("-").replace("-", "_")
            advice = f", or did you mean --{close}?" if close else ""
            message = f"no option {name}: settings are written key=value, {key}={value}{advice}"
            raise click.UsageError(message, ctx) from None
