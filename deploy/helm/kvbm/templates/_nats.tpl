{{/* The configuration of each server; what differs is POD_NAME. */}}
{{- define "kvbm.natsConf" -}}
{{- $name := printf "%s-nats" (include "kvbm.fullname" .) -}}
{{- $replicas := int .Values.nats.replicas -}}
# Accounts, keys and permissions are in the Secret, which `kvbm kube-secrets` has written. The
# monitor asks for no credentials: only the probes in the container reach it.
include "kvbm/creds/nats-server.conf"
http: "127.0.0.1:8222"
server_name: $POD_NAME
{{- if gt $replicas 1 }}
cluster {
  name: {{ $name }}
  listen: "0.0.0.0:6222"
  # Clients have the names of all servers. Addresses of pods are in no certificate.
  no_advertise: true
  routes: [
    {{- range $number := until $replicas }}
    "tls://{{ $name }}-{{ $number }}.{{ $name }}:6222"
    {{- end }}
  ]
  # The authority signs certificates of etcd's clients, too: only names of routes count.
  tls {
    cert_file: "/etc/kvbm/creds/server.pem"
    key_file: "/etc/kvbm/creds/server.key"
    ca_file: "/etc/kvbm/creds/ca.pem"
    verify_cert_and_check_known_urls: true
    timeout: 5
  }
}
{{- end }}
{{- end -}}
