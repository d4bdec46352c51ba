"""VPC: all nodes in one private subnet behind one NAT gateway, the control plane's interfaces in two zones."""

from __future__ import annotations

import dataclasses
import ipaddress

import pulumi
import pulumi_aws as aws
from pulumi import ResourceOptions

from infra.facts import Zones
from naming import Tags, named


@dataclasses.dataclass(frozen=True)
class Subnets:
    nodes: str
    public: str
    control_plane: tuple[str, str]


def subnets(cidr: str) -> Subnets:
    """The upper half of the VPC for nodes and pods; three /28 at the bottom for the NAT gateway and the control plane's interfaces.

    AWS advises small subnets of their own for the latter (https://docs.aws.amazon.com/eks/latest/userguide/network-reqs.html).
    """
    network = ipaddress.IPv4Network(cidr)
    lower, upper = network.subnets(1)
    small = lower.subnets(new_prefix=28)
    public, first, second = (str(next(small)) for _ in range(3))
    return Subnets(str(upper), public, (first, second))


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkArgs:
    cidr: str
    region: str
    zones: Zones
    zone_is_fixed: bool  # named by the stack, so that a change of it is wanted
    tags: Tags


class Network(pulumi.ComponentResource):
    """``egress``: everything nodes need to join and to be drained; node groups wait for all of it, and so go before it."""

    def __init__(self, name: str, args: NetworkArgs, opts: ResourceOptions | None = None) -> None:
        super().__init__("ray-train-efa:infra:Network", name, None, opts)
        child = ResourceOptions(parent=self)
        # AWS may add zones or the order of names may change: a zone chosen by the program is kept as it is in the state.
        always_chosen = ResourceOptions(parent=self, ignore_changes=["availabilityZone"])
        # A subnet can't move, and its successor has the same addresses: the old one must go first.
        chosen = ResourceOptions(parent=self, delete_before_replace=True) if args.zone_is_fixed else always_chosen
        plan = subnets(args.cidr)

        self.vpc = aws.ec2.Vpc(
            f"{name}-vpc", cidr_block=args.cidr, enable_dns_hostnames=True, enable_dns_support=True, tags=named(args.tags, f"{name}-vpc"), opts=child
        )
        gateway = aws.ec2.InternetGateway(f"{name}-igw", vpc_id=self.vpc.id, tags=named(args.tags, f"{name}-igw"), opts=child)

        def subnet(what: str, cidr: str, zone: str, options: ResourceOptions) -> aws.ec2.Subnet:
            tags = named(args.tags, f"{name}-{what}")
            return aws.ec2.Subnet(f"{name}-{what}", vpc_id=self.vpc.id, cidr_block=cidr, availability_zone=zone, tags=tags, opts=options)

        public = subnet("public", plan.public, args.zones.nodes, chosen)
        self.nodes = subnet("nodes", plan.nodes, args.zones.nodes, chosen)
        self.control_plane = [
            subnet(f"control-plane-{i}", cidr, zone, always_chosen)
            for i, (cidr, zone) in enumerate(zip(plan.control_plane, args.zones.control_plane, strict=True))
        ]

        public_routes = aws.ec2.RouteTable(f"{name}-public", vpc_id=self.vpc.id, tags=named(args.tags, f"{name}-public"), opts=child)
        to_internet = aws.ec2.Route(f"{name}-public", route_table_id=public_routes.id, destination_cidr_block="0.0.0.0/0", gateway_id=gateway.id, opts=child)
        public_link = aws.ec2.RouteTableAssociation(f"{name}-public", subnet_id=public.id, route_table_id=public_routes.id, opts=child)
        # An address of a VPC that has no internet gateway (any more) can't be mapped.
        address = aws.ec2.Eip(f"{name}-nat", domain="vpc", tags=named(args.tags, f"{name}-nat"), opts=ResourceOptions(parent=self, depends_on=[gateway]))
        nat = aws.ec2.NatGateway(
            f"{name}-nat",
            allocation_id=address.id,
            subnet_id=public.id,
            tags=named(args.tags, f"{name}-nat"),
            # Fails with Gateway.NotAttached before the way out exists, and blocks the gateway's detachment.
            opts=ResourceOptions(parent=self, depends_on=[gateway, to_internet, public_link]),
        )
        private_routes = aws.ec2.RouteTable(f"{name}-private", vpc_id=self.vpc.id, tags=named(args.tags, f"{name}-private"), opts=child)
        out = aws.ec2.Route(f"{name}-private", route_table_id=private_routes.id, destination_cidr_block="0.0.0.0/0", nat_gateway_id=nat.id, opts=child)
        link = aws.ec2.RouteTableAssociation(f"{name}-nodes", subnet_id=self.nodes.id, route_table_id=private_routes.id, opts=child)
        # Free, and keeps data sets and checkpoints off the NAT gateway, which charges per GB.
        s3 = aws.ec2.VpcEndpoint(
            f"{name}-s3",
            vpc_id=self.vpc.id,
            service_name=f"com.amazonaws.{args.region}.s3",
            vpc_endpoint_type="Gateway",
            route_table_ids=[private_routes.id],
            tags=named(args.tags, f"{name}-s3"),
            opts=child,
        )
        self.egress: list[pulumi.Resource] = [out, link, s3]
        self.register_outputs({"vpcId": self.vpc.id, "nodesSubnetId": self.nodes.id})
