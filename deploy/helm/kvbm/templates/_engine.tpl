{{/* What the pod of an engine needs, as a patch of its Deployment. Strategic merges find a container
by its name, so `engine` must be that of the engine's container. */}}
{{- define "kvbm.enginePatch" -}}
spec:
  template:
    metadata:
      labels: {{ include "kvbm.json" .Values.networkPolicy.engines }}
    spec:
      # One /dev/shm, and one process namespace, with the tiers of the node.
      hostIPC: true
      hostPID: {{ toJson .Values.node.hostPID }}
      {{- if .Values.node.hostNetwork }}
      hostNetwork: true
      dnsPolicy: ClusterFirstWithHostNet
      {{- end }}
      enableServiceLinks: false
      containers:
        - name: engine
          env:
            - name: KVBM_RUNTIME_DIR
              value: /run/kvbm
            - name: UCX_NET_DEVICES
              value: {{ ternary "lo" "all" .Values.node.hostNetwork | quote }}
          securityContext:
            runAsUser: 10001
            runAsGroup: 10001
          volumeMounts:
            - {name: kvbm-run, mountPath: /run/kvbm}
      volumes:
        - name: kvbm-run
          hostPath: {path: {{ .Values.node.runtimeDir | quote }}, type: Directory}
{{- end -}}

{{- define "kvbm.engineArgs" -}}
--kv-transfer-config={"kv_connector":"KvbmConnector","kv_connector_module_path":"kvbm_connectors.vllm","kv_role":"kv_both"}
{{- end -}}
