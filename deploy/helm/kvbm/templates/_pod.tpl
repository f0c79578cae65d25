{{/* What all pods have. Service links would make variables such as KVBM_SERVICE_PORT. */}}
{{- define "kvbm.pod" -}}
serviceAccountName: {{ include "kvbm.fullname" .root | quote }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{- range . }}
  - name: {{ . | quote }}
{{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ int .user }}
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "kvbm.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{ include "kvbm.json" . }}
{{- end }}
{{- with .tolerations }}
tolerations: {{ include "kvbm.json" . }}
{{- end }}
{{- end -}}

{{/* Two replicas on one node would be lost together. */}}
{{- define "kvbm.apart" -}}
podAntiAffinity:
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      podAffinityTerm:
        topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels: {{- include "kvbm.selector" .root | nindent 12 }}
            app.kubernetes.io/component: {{ .name }}
{{- end -}}

{{- define "kvbm.closed" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "kvbm.tmp" -}}
emptyDir: {medium: Memory, sizeLimit: 64Mi}
{{- end -}}

{{/* Arguments: root, name, port. A kubelet has no token: probes get no reasons. */}}
{{- define "kvbm.probes" -}}
livenessProbe:
  httpGet: {path: /healthz, port: {{ .port }}}
  periodSeconds: 10
  timeoutSeconds: 2
readinessProbe:
  httpGet: {path: /readyz, port: {{ .port }}}
  periodSeconds: 5
  timeoutSeconds: 2
{{- end -}}

{{/* How a service reaches NATS and the registry, and what its own port wants. */}}
{{- define "kvbm.env" -}}
{{- $values := .root.Values -}}
- name: KVBM_NATS_URL
  value: {{ include "kvbm.natsUrl" .root | quote }}
- name: KVBM_CREDS_DIR
  value: /etc/kvbm/creds
{{- if $values.nats.ca }}
- name: KVBM_NATS_CA_FILE
  value: /etc/kvbm/creds/ca.pem
{{- end }}
{{- if gt (int $values.index.partitions) 1 }}
- name: KVBM_INDEX_PARTITIONS
  value: {{ $values.index.partitions | quote }}
{{- end }}
{{- end -}}

{{- define "kvbm.serviceEnv" -}}
{{- $values := .root.Values -}}
{{ include "kvbm.env" . }}
- name: KVBM_SERVICE_PORT
  value: {{ .port | quote }}
- name: KVBM_SCRAPE_TOKEN_FILE
  value: /etc/kvbm/creds/scrape.token
{{- with $values.etcd.url }}
{{- $at := ternary "/etc/kvbm/etcd" "/etc/kvbm/creds" (ne $values.etcd.secretName "") }}
- name: KVBM_REGISTRY_URL
  value: {{ . | quote }}
- name: KVBM_ETCD_CA_FILE
  value: {{ $at }}/ca.pem
- name: KVBM_ETCD_CERT_FILE
  value: {{ $at }}/etcd.pem
- name: KVBM_ETCD_KEY_FILE
  value: {{ $at }}/etcd.key
{{- end }}
{{- range $name, $value := $values.settings }}
- name: {{ $name | quote }}
  value: {{ include "kvbm.text" $value }}
{{- end }}
{{- end -}}

{{- define "kvbm.etcdMount" -}}
{{- if and .Values.etcd.url .Values.etcd.secretName }}
- {name: etcd-creds, mountPath: /etc/kvbm/etcd, readOnly: true}
{{- end }}
{{- end -}}

{{- define "kvbm.etcdVolume" -}}
{{- if and .Values.etcd.url .Values.etcd.secretName }}
- name: etcd-creds
  secret: {secretName: {{ .Values.etcd.secretName | quote }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{/* How tiers and metrics know that there is a bucket, or a directory instead. */}}
{{- define "kvbm.bucketEnv" -}}
{{- with .Values.bucket }}
{{- if .enabled }}
{{- if ne (len (compact (list .name .claimName .path))) 1 }}
{{- fail "bucket.enabled wants one of bucket.name, bucket.claimName and bucket.path" }}
{{- end }}
{{- if .name }}
- name: DYN_KVBM_OBJECT_ENABLED
  value: "true"
- name: DYN_KVBM_OBJECT_BUCKET
  value: {{ .name | quote }}
{{- else }}
- name: KVBM_OBJECT_URL
  value: file:///var/lib/kvbm/objects
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The file system that all nodes share instead of a bucket, where there is one. */}}
{{- define "kvbm.objectsVolume" -}}
{{- with .Values.bucket }}
{{- if and .enabled .claimName }}
- name: objects
  persistentVolumeClaim: {claimName: {{ .claimName | quote }}}
{{- else if and .enabled .path }}
- name: objects
  hostPath: {path: {{ .path | quote }}, type: Directory}
{{- end }}
{{- end }}
{{- end -}}
