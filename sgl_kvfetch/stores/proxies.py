"""Which proxy leads to a store: what the environment says, read alike for ``http(s)://`` and ``s3://`` stores.

aiohttp and obstore would each read it in their own way. aiohttp knows neither ``ALL_PROXY`` nor networks such as
10.0.0.0/8 in ``NO_PROXY``, and it would also take credentials from ~/.netrc, which replace our token. obstore would ask
a proxy for this machine itself.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit
from urllib.request import getproxies_environment

from sgl_kvfetch.errors import ConfigError

# This machine; and addresses of this link, where clouds give out the credentials of a machine's role.
_NEVER = ("localhost", "127.0.0.0/8", "::1", "169.254.0.0/16")
_EVERYTHING = ("*", "0.0.0.0/0", "::/0")  # obstore takes "*" for names alone


@dataclass(frozen=True, slots=True)
class Proxy:
    url: str = field(repr=False)  # may hold a user and a password
    excluded: tuple[str, ...]  # hosts, domains and networks that are reached without it

    def leads_to(self, host: str) -> bool:
        """Return whether a host is reached through this proxy."""
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return not any(_is_within(host.lower(), domain.lower()) for domain in self.excluded)
        return not any(address in network for network in map(_network, self.excluded) if network)


def environment_proxy(scheme: str) -> Proxy | None:
    """Return the proxy that the environment names for URLs of this scheme: HTTP_PROXY or HTTPS_PROXY, or else
    ALL_PROXY. Names may be in lower case. Raises ConfigError for a proxy of another kind."""
    proxies: Mapping[str, str] = getproxies_environment()
    name = scheme if scheme in proxies else "all"
    if name not in proxies:
        return None
    url = proxies[name] if "://" in proxies[name] else f"http://{proxies[name]}"
    if urlsplit(url).scheme not in ("http", "https"):
        raise ConfigError(
            f"{name.upper()}_PROXY in the environment is a {urlsplit(url).scheme}:// proxy; expected http:// or "
            "https://. NO_PROXY lists the hosts that are reached without it"
        )
    excluded = tuple(entry for each in proxies.get("no", "").split(",") if (entry := each.strip()))
    return Proxy(url, _NEVER + (_EVERYTHING if "*" in excluded else excluded))


def _is_within(host: str, domain: str) -> bool:
    domain = domain.removeprefix(".")
    return domain == "*" or host == domain or host.endswith(f".{domain}")


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """Return the addresses that an entry of NO_PROXY means; None for a name."""
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None
