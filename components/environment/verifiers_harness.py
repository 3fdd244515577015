"""A harness for verifiers: one model call per segment, made in this process. Imported where verifiers is installed."""

import ssl
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["SingleCall"]  # verifiers looks the class of a harness up here
_TRUSTED = ssl.create_default_context()  # reading the certificates takes longer than a call


class SingleCall(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """Sends the conversation to the model and ends; the programs that verifiers ships start a process per turn."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        """One call; a status other than 200 is the exit code 1, whose cause verifiers has recorded."""
        system, prompt = self.resolve_prompt(data)
        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt)
        messages = [{"role": "system", "content": system}] * bool(system) + [*said]
        async with httpx.AsyncClient(timeout=None, trust_env=False, verify=_TRUSTED) as client:
            reply = await client.post(
                f"{endpoint}/chat/completions",
                json={"model": ctx.model, "messages": messages},
                headers={"Authorization": f"Bearer {secret}"},
            )
        failed = reply.status_code != 200
        return vf.ProgramResult(exit_code=int(failed), stdout="", stderr=reply.text[:200] if failed else "")
