"""The network interfaces of an EFA node, from the EC2 API's facts of the instance type alone."""

from __future__ import annotations

from typing import Any


def interfaces(efa_interfaces: int, network_cards: int, security_groups: Any) -> list[dict[str, Any]]:
    """Launch template interfaces with as many EFA devices as the type takes (EfaInfo.MaximumEfaInterfaces, NetworkInfo.MaximumNetworkCards).

    One card: one ``efa`` interface, which is ENA and EFA at once. Several: ENA alone as the primary (it has the only IP address), ``efa-only``
    as device 1 of card 0, and ``efa-only`` as device 0 of each further card; where there are fewer EFA devices than cards, card 0 goes without
    one first (p6-b300 has 17 cards, 16 of them with EFA).
    Source: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html

    Groups go into each interface, for EC2 takes them there or at top level but not in both places, and EKS adds none of its own to a template
    that names some. No subnet and no public address: EKS forbids the first, the nodes need none of the second.
    Raises ValueError for a type without EFA.
    """
    if efa_interfaces < 1 or network_cards < 1:
        raise ValueError(f"no EFA: {efa_interfaces} interfaces on {network_cards} network cards")
    if network_cards == 1:
        return [_interface(0, 0, "efa", security_groups)]
    first_card_has_efa = efa_interfaces >= network_cards
    result = [_interface(0, 0, "interface", security_groups)]
    if first_card_has_efa:
        result.append(_interface(0, 1, "efa-only", security_groups))
    further = min(efa_interfaces, network_cards) - int(first_card_has_efa)
    return result + [_interface(card, 0, "efa-only", security_groups) for card in range(1, further + 1)]


def efa_count(layout: list[dict[str, Any]]) -> int:
    """EFA devices of a layout: what the node offers as vpc.amazonaws.com/efa, and what a pod may ask for."""
    return sum(interface["interface_type"] != "interface" for interface in layout)


def _interface(card: int, device: int, kind: str, security_groups: Any) -> dict[str, Any]:
    return {
        "network_card_index": card,
        "device_index": device,
        "interface_type": kind,
        "delete_on_termination": "true",  # else the interface outlives the node and blocks the subnet's deletion
        "security_groups": security_groups,
    }
