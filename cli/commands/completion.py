"""`busbar completion`."""

from __future__ import annotations

import click


@click.command(
    epilog="""\b
Examples:
  source <(busbar completion bash)                                  now
  busbar completion bash > ~/.local/share/bash-completion/completions/busbar
  busbar completion zsh > "${fpath[1]}/_busbar"
  busbar completion fish > ~/.config/fish/completions/busbar.fish
"""
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that completes busbar's commands, options and object names in a shell."""
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None  # click supports all three shells
    click.echo(found(ctx.find_root().command, {}, "busbar", "_BUSBAR_COMPLETE").source())
