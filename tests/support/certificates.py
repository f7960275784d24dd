# SPDX-License-Identifier: Apache-2.0
"""Certificates for loopback, each its own CA."""

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

import pytest


def write_certificate(folder, name, ends_in_days=30):
    """Write a certificate that began ten days ago, and its key; gives both paths."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    addresses = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1")), x509.DNSName("localhost")])
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(subject).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).add_extension(addresses, critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    builder = builder.not_valid_before(now - timedelta(days=10)).not_valid_after(now + timedelta(days=ends_in_days))
    pem, plain = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    folder.mkdir(exist_ok=True)
    certificate_file, key_file = folder / f"{name}.pem", folder / f"{name}.key"
    certificate_file.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(pem))
    key_file.write_bytes(key.private_bytes(pem, plain, serialization.NoEncryption()))
    return certificate_file, key_file
